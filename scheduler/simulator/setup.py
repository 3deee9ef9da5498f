"""The simulation that settings ask for: defaults, sizes, and errors that name the value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kvxfer.errors import InvalidArgument
from kvxfer.scheduler.scaling.trace import Load
from kvxfer.scheduler.scaling.worker_model import WorkerModel
from kvxfer.scheduler.simulator.policies import Policy, capacity, read_policy
from kvxfer.scheduler.simulator.run import Simulation
from kvxfer.scheduler.simulator.settings import SimulationSettings, option
from kvxfer.scheduler.simulator.trace_files import read_requests
from kvxfer.scheduler.simulator.workload import GeneratedDay, Workload

# The options of members of WorkerModel whose names differ.
_OPTIONS: Final = {"prefill_tokens_per_second": "prefill_speed"}
_HOURS, _LOAD, _PROMPT_TOKENS, _OUTPUT_TOKENS = 24.0, 0.5, 2000.0, 250.0
_MOST_REQUESTS: Final = 1_000_000
# The load of these seconds sizes the fleet that a policy begins with.
_FIRST_SECONDS: Final = 600.0


def prepare(
    asked: SimulationSettings, workers: Mapping[str, Any]
) -> tuple[Simulation, list[Policy]]:
    """Raises InvalidArgument."""
    model = _model(workers)
    workload: Workload
    if asked.trace is not None:
        workload = read_requests(asked.trace)
        mean = workload.load(0.0, workload.seconds)
    else:
        mean = Load(
            0.0, asked.prompt_tokens or _PROMPT_TOKENS, asked.output_tokens or _OUTPUT_TOKENS
        )
    if mean.prompt_tokens / 16 > model.kv_blocks:
        raise InvalidArgument(
            f"--kv-blocks is {model.kv_blocks}, {model.kv_blocks * 16} tokens, and the mean prompt "
            f"has {mean.prompt_tokens:.0f}; write more"
        )
    can = capacity(model, mean, itl_target=asked.itl_target)
    if asked.trace is None:
        rate = asked.rate or (asked.load or _LOAD) * can.of(*can.split(asked.instances))
        if rate > _MOST_REQUESTS:
            raise InvalidArgument(
                f"--rate is {rate:g}, or --load and --instances come to that; {_MOST_REQUESTS:,} "
                "requests/s is the most"
            )
        workload = GeneratedDay(
            hours=asked.hours or _HOURS,
            requests_per_second=rate,
            prompt_tokens=mean.prompt_tokens,
            output_tokens=mean.output_tokens,
            seed=asked.seed,
        )
    at_first = workload.load(0.0, min(_FIRST_SECONDS, workload.seconds)).requests_per_second
    policies = [
        read_policy(
            text,
            instances=asked.instances,
            of=can,
            load=mean,
            at_first=at_first,
            ttft_target=asked.ttft_target,
            itl_target=asked.itl_target,
        )
        for text in asked.policies
    ]
    simulation = Simulation(
        workload=workload,
        model=model,
        detail=asked.detail,
        heartbeat_seconds=asked.heartbeat_seconds,
        ttft_target=asked.ttft_target,
        itl_target=asked.itl_target,
        rack_size=asked.rack_size,
        gpus=asked.gpus,
        cost_per_hour=asked.cost_per_hour,
        seed=asked.seed,
    )
    return simulation, policies


def _model(workers: Mapping[str, Any]) -> WorkerModel:
    try:
        return WorkerModel(**workers)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise InvalidArgument(f"{option(_OPTIONS.get(name, name))} {rest}") from error
