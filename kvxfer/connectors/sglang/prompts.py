"""Tells senders and receivers of SGLang which prompt their request has.

SGLang gives them a room number alone, which a client may have chosen. With the prompt both sides
can tell whether they mean the same request.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from kvxfer.errors import InvalidArgument

_PREFILL = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"
_DECODE = "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"


def hand_prompts_over(mode: DisaggregationMode) -> None:
    """Once per scheduler process. Raises InvalidArgument where SGLang has no such methods."""
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


def _after_create_sender(created: bool, _queue: Any, req: Any, *_: Any, **__: Any) -> None:
    if created:
        _tell(req.disagg_kv_sender, req)


def _after_create_receiver(created: Any, _queue: Any, req: Any, *_: Any, **__: Any) -> None:
    _tell(created.kv_receiver, req)


def _tell(side: Any, req: Any) -> None:
    if hasattr(side, "take_prompt"):  # that of a health check has none
        side.take_prompt(req.origin_input_ids)
