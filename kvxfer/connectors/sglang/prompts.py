"""Hooks that pass the prompt and LoRA of a request to its SGLang sender or receiver.

SGLang passes only a room number, which a client may have chosen. With the prompt, both sides can
check that they mean the same request.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvxfer.connectors.checkpoints import adapter_of
from kvxfer.errors import InvalidArgument

_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"


def hand_prompts_over(mode: DisaggregationMode) -> None:
    """Installs the hook, once per scheduler process. Raises InvalidArgument if SGLang lacks the
    hooked method."""
    prefill = mode is DisaggregationMode.PREFILL
    target = _PREFILL if prefill else _DECODE
    hook: Callable[..., None] = _after_create_sender if prefill else _after_create_receiver
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(
            f"this version of SGLang has no {target}, where kvxfer learns the prompt of a request; "
            "use SGLang 0.5.23"
        ) from error
    HookRegistry.register(target, hook, HookType.AFTER)
    HookRegistry.apply_hooks()


def _after_create_sender(created: bool, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    if created:
        _tell(req.disagg_kv_sender, queue.scheduler, req)


def _after_create_receiver(created: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    _tell(created.kv_receiver, queue.scheduler, req)


def _tell(side: Any, scheduler: Any, req: Any) -> None:
    if hasattr(side, "take_prompt"):  # the sides of a health check lack it
        side.take_prompt(req.origin_input_ids, _adapter(scheduler, req.lora_id))


def _adapter(scheduler: Any, lora_id: str | None) -> str:
    """Returns the LoRA's identity, from its weights, as SGLang's id may differ between servers;
    "" for none."""
    if lora_id is None:
        return ""
    adapter = scheduler.tp_worker.model_runner.lora_manager.lora_refs.get(lora_id)
    return lora_id if adapter is None else adapter_of(adapter.lora_name, adapter.lora_path)
