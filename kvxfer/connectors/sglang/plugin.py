"""The entry point in SGLang's group `sglang.srt.plugins`: makes the backend known by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

NAME: Final = "kvxfer"


def register() -> None:
    """Registers the backend. SGLang calls this once in each of its processes, before it reads its
    arguments.

    SGLang's backends are a closed enum and a function that maps them to classes. The enum's own
    hook for unknown values gives the name a member; the function is hooked.
    """
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([NAME])
    backend = object.__new__(TransferBackend)
    backend._name_, backend._value_ = NAME.upper(), NAME
    TransferBackend._missing_ = classmethod(lambda _, value: backend if value == NAME else None)

    def get_kv_class(original: Callable[[Any, Any], Any], transfer_backend: Any, kind: Any) -> Any:
        classes = _classes() if transfer_backend is backend else {}
        return classes.get(kind.value) or original(transfer_backend, kind)

    HookRegistry.register(
        "sglang.srt.disaggregation.utils.get_kv_class", get_kv_class, HookType.AROUND
    )


def _classes() -> dict[str, type]:
    from kvxfer.connectors.sglang import backend

    return {
        "manager": backend.KVManager,
        "sender": backend.KVSender,
        "receiver": backend.KVReceiver,
        "bootstrap_server": backend.KVBootstrapServer,
    }
