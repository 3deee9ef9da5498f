"""Weight updates, all or nothing, from the ranks that train a model to the ranks that serve it.

A PyTorch training loop pushes after each step that is to be served:

    push = weights.push(model, version)
    push.read()                 # the next step may change the parameters
    report = push.result()      # all instances serve the version, or a named error

`Trainer` does the same for programs that describe their holdings themselves. An inference rank has
a `WeightReceiver`: it stages the next weights beside those that it serves, and its engine applies
them between two steps. See docs/weights.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kvxfer.weights.holdings import Holding, Holdings, map_of
    from kvxfer.weights.maps import Parameters, Part, Side, WeightMap
    from kvxfer.weights.plan.schedule import Piece, Schedule, Write, plan_weights
    from kvxfer.weights.plan.settings import ScheduleSettings
    from kvxfer.weights.pushing import forget, push
    from kvxfer.weights.quantize import (
        FP8_BLOCKS,
        FP8_CHANNELS,
        FP8_TENSOR,
        INT8_CHANNELS,
        Quantization,
    )
    from kvxfer.weights.report import InstanceReport, UpdateReport
    from kvxfer.weights.torch_state import TrainingState, state_of
    from kvxfer.weights.trainer import Push, SyncControlPath, Trainer
    from kvxfer.weights.transfer.arena import Arena, Place
    from kvxfer.weights.transfer.coordinator import WeightCoordinator
    from kvxfer.weights.transfer.execution import ControlPath
    from kvxfer.weights.transfer.receiver import WeightReceiver
    from kvxfer.weights.transfer.registrar import Announced, Registrar
    from kvxfer.weights.transfer.sender import Pushed, WeightSender
    from kvxfer.weights.transfer.settings import UpdateSettings
    from kvxfer.weights.transfer.staged import Staged
    from kvxfer.weights.vllm_quantization import quantized_for_vllm

# Imported on first use: the command line needs only the plan, and no torch.
_HOMES: Final = {
    "Announced": "kvxfer.weights.transfer.registrar",
    "Arena": "kvxfer.weights.transfer.arena",
    "ControlPath": "kvxfer.weights.transfer.execution",
    "FP8_BLOCKS": "kvxfer.weights.quantize",
    "FP8_CHANNELS": "kvxfer.weights.quantize",
    "FP8_TENSOR": "kvxfer.weights.quantize",
    "Holding": "kvxfer.weights.holdings",
    "Holdings": "kvxfer.weights.holdings",
    "INT8_CHANNELS": "kvxfer.weights.quantize",
    "InstanceReport": "kvxfer.weights.report",
    "Parameters": "kvxfer.weights.maps",
    "Part": "kvxfer.weights.maps",
    "Piece": "kvxfer.weights.plan.schedule",
    "Place": "kvxfer.weights.transfer.arena",
    "Push": "kvxfer.weights.trainer",
    "Pushed": "kvxfer.weights.transfer.sender",
    "Quantization": "kvxfer.weights.quantize",
    "Registrar": "kvxfer.weights.transfer.registrar",
    "Schedule": "kvxfer.weights.plan.schedule",
    "ScheduleSettings": "kvxfer.weights.plan.settings",
    "Side": "kvxfer.weights.maps",
    "Staged": "kvxfer.weights.transfer.staged",
    "SyncControlPath": "kvxfer.weights.trainer",
    "Trainer": "kvxfer.weights.trainer",
    "TrainingState": "kvxfer.weights.torch_state",
    "UpdateReport": "kvxfer.weights.report",
    "UpdateSettings": "kvxfer.weights.transfer.settings",
    "WeightCoordinator": "kvxfer.weights.transfer.coordinator",
    "WeightMap": "kvxfer.weights.maps",
    "WeightReceiver": "kvxfer.weights.transfer.receiver",
    "WeightSender": "kvxfer.weights.transfer.sender",
    "Write": "kvxfer.weights.plan.schedule",
    "forget": "kvxfer.weights.pushing",
    "map_of": "kvxfer.weights.holdings",
    "plan_weights": "kvxfer.weights.plan.schedule",
    "push": "kvxfer.weights.pushing",
    "quantized_for_vllm": "kvxfer.weights.vllm_quantization",
    "state_of": "kvxfer.weights.torch_state",
}

__all__ = [
    "FP8_BLOCKS",
    "FP8_CHANNELS",
    "FP8_TENSOR",
    "INT8_CHANNELS",
    "Announced",
    "Arena",
    "ControlPath",
    "Holding",
    "Holdings",
    "InstanceReport",
    "Parameters",
    "Part",
    "Piece",
    "Place",
    "Push",
    "Pushed",
    "Quantization",
    "Registrar",
    "Schedule",
    "ScheduleSettings",
    "Side",
    "Staged",
    "SyncControlPath",
    "Trainer",
    "TrainingState",
    "UpdateReport",
    "UpdateSettings",
    "WeightCoordinator",
    "WeightMap",
    "WeightReceiver",
    "WeightSender",
    "Write",
    "forget",
    "map_of",
    "plan_weights",
    "push",
    "quantized_for_vllm",
    "state_of",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
