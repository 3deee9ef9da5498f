"""The policies to compare: fixed sizes, scaling files, pairing files; and the size of a fleet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvxfer.errors import InvalidArgument
from kvxfer.scheduler.pairing_file import read_pairing_file
from kvxfer.scheduler.scaling.policy import RolePolicy, ScalingPolicy
from kvxfer.scheduler.scaling.policy_file import read_scaling_file
from kvxfer.scheduler.scaling.trace import Load
from kvxfer.scheduler.scaling.worker_model import BLOCK_TOKENS, WorkerModel
from kvxfer.scheduler.scoring import Scorer

_REMEDY: Final = (
    "write fixed, fixed=PREFILL:DECODE, scaling=default, scaling=FILE, pairing=FILE, or two of "
    "them with a comma"
)
# The least part of a fleet that the default policy keeps, and the most that it adds or takes away.
_LEAST_PART: Final = 1 / 8
_UP_PART, _DOWN_PART = 1 / 20, 1 / 50
_UTILISATION: Final = 0.8


@dataclass(frozen=True, slots=True)
class Policy:
    """One of the policies to compare."""

    name: str
    prefill: int
    """Workers at the beginning."""
    decode: int
    scaling: ScalingPolicy | None = None
    """The autoscaler's policy; None keeps these counts."""
    scorer: Scorer | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """The requests per second that one worker of each role serves, fully used."""

    prefill: float
    decode: float
    batch: float
    """Requests in the batch of decode at that rate."""

    def split(self, instances: int) -> tuple[int, int]:
        """Returns the prefill and decode workers that reach their limits together."""
        part = self.decode / (self.prefill + self.decode)
        prefill = min(max(round(instances * part), 1), instances - 1)
        return prefill, instances - prefill

    def of(self, prefill: int, decode: int) -> float:
        return min(prefill * self.prefill, decode * self.decode)


def capacity(model: WorkerModel, load: Load, *, itl_target: float) -> Capacity:
    """Returns the capacity with the largest batch that keeps the target and fits into the KV
    cache."""
    in_cache = model.kv_blocks * BLOCK_TOKENS / (load.prompt_tokens + load.output_tokens / 2)
    in_target = (itl_target - model.itl_base) / model.itl_per_request
    batch = max(min(in_cache, in_target, model.batch), 1.0)
    return Capacity(
        prefill=1 / model.prefill_seconds(load.prompt_tokens),
        decode=batch / model.itl(batch) / load.output_tokens,
        batch=batch,
    )


def read_policy(
    text: str,
    *,
    instances: int,
    of: Capacity,
    load: Load,
    at_first: float,
    ttft_target: float,
    itl_target: float,
) -> Policy:
    """Parses `--policy`. `at_first` is the rate at the beginning.

    Raises InvalidArgument that names the part and the remedy.
    """
    prefill, decode = of.split(instances)
    scaling: ScalingPolicy | None = None
    scorer: Scorer | None = None
    seen: set[str] = set()
    for part in text.split(","):
        what, _, value = part.strip().partition("=")
        group = "size" if what in ("fixed", "scaling") else what
        if group in seen:
            raise InvalidArgument(f"--policy {text}: {part.strip()!r} comes too often; {_REMEDY}")
        seen.add(group)
        if what == "fixed":
            prefill, decode = _counts(text, value) if value else (prefill, decode)
        elif what == "scaling" and value == "default":
            scaling = _default(prefill, decode, of, load, ttft_target, itl_target)
        elif what == "scaling" and value:
            scaling = read_scaling_file(Path(value))
        elif what == "pairing" and value:
            scorer = read_pairing_file(Path(value)).scorer
        else:
            raise InvalidArgument(f"--policy {text}: {part.strip()!r} is no policy; {_REMEDY}")
    if scaling is not None:
        prefill = _begin(scaling.prefill, at_first / of.prefill)
        decode = _begin(scaling.decode, at_first / of.decode)
    return Policy(text, prefill, decode, scaling, scorer)


def _counts(text: str, value: str) -> tuple[int, int]:
    prefill, _, decode = value.partition(":")
    if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
        raise InvalidArgument(
            f"--policy {text}: {value!r} are no counts; write PREFILL:DECODE, each 1 or more"
        )
    return int(prefill), int(decode)


def _begin(role: RolePolicy, workers: float) -> int:
    return min(max(math.ceil(workers / _UTILISATION), role.min), role.max)


def _default(
    prefill: int, decode: int, of: Capacity, load: Load, ttft_target: float, itl_target: float
) -> ScalingPolicy:
    """Returns a policy up to the whole fleet, by the speed of its workers and the targets."""
    instances = prefill + decode
    return ScalingPolicy(
        step_up=max(4, math.ceil(instances * _UP_PART)),
        step_down=max(1, math.ceil(instances * _DOWN_PART)),
        prefill=RolePolicy(
            min=max(1, math.ceil(prefill * _LEAST_PART)),
            max=prefill,
            latency=ttft_target,
            tokens_per_second=of.prefill * load.prompt_tokens,
            utilisation=_UTILISATION,
        ),
        decode=RolePolicy(
            min=max(1, math.ceil(decode * _LEAST_PART)),
            max=decode,
            latency=itl_target,
            tokens_per_second=of.decode * load.output_tokens,
            utilisation=_UTILISATION,
            requests=of.batch,
            backlog=of.batch,
        ),
    )
