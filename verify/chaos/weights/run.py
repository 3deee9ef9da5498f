"""Faulted updates, one after the other, and the checks of each."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvxfer.weights.transfer.settings import Mode
from verify.polling import PATIENCE

from .catalogue import Fault, catalogue
from .content import INSTANCES, TRAINERS
from .fleet import Control, Fleet, fleet

_HANG_SECONDS: Final = 12.0
"""The longest deadline of the updates is 8 s."""
_PAUSE: Final = 0.02
_TRAINER_NAMES: Final = [f"trainer-{rank}" for rank in range(TRAINERS)]


@dataclass
class Round:
    """One faulted update."""

    fault: Fault
    mode: Mode = "atomic"
    ended: str = ""
    """The end: "committed", or the trainers' error codes."""
    happened: bool = False
    """Whether the update reached the fault."""
    naming_seconds: float | None = None
    """The seconds from the fault until the last surviving training rank had an answer."""
    broken: list[str] = field(default_factory=list)
    """Broken promises."""


async def run(
    fabric: str,
    count: int,
    rng: random.Random,
    tell: Callable[[Round], None] = lambda _: None,
    *,
    mode: Mode = "atomic",
    faults: Sequence[Fault] = (),
    defect: str = "",
) -> list[Round]:
    """Runs `count` rounds, with `faults` (or the whole catalogue) in random order, repeatedly. Ends
    after the first round that breaks a promise. `defect` is one of DEFECTS."""
    kinds = list(faults or catalogue(mode))
    rng.shuffle(kinds)
    done: list[Round] = []
    async with fleet(fabric, mode, defect) as at:
        await at.joined()
        for number in range(count):
            round_ = Round(kinds[number % len(kinds)], mode)
            await _faulted(at, round_)
            await _repaired(at, round_)
            done.append(round_)
            tell(round_)
            if round_.broken:
                break  # later rounds would show the same
    return done


async def _faulted(at: Fleet, round_: Round) -> None:
    fault, version = round_.fault, at.served + 1
    if fault.kind in ("Plan", "Planned"):
        await at.rejoin()
    victim = at.control(fault.victim)
    victim.broken_at = None
    await victim.ask(do="break", on=fault.on, kind=fault.kind, act=fault.act, count=fault.nth)
    pushes = {
        name: asyncio.ensure_future(at.control(name).ask(_HANG_SECONDS, do="push", version=version))
        for name in _TRAINER_NAMES
    }
    living = [push for name, push in pushes.items() if name != fault.victim]
    await asyncio.wait(living)
    round_.happened = _broken_at(victim) is not None
    answers = [_answer(push) for push in living]
    for name, answer in zip([n for n in pushes if n != fault.victim], answers, strict=True):
        if answer is None:
            round_.broken.append(f"{name} had no answer within {_HANG_SECONDS:g} s")
    heard = [answer for answer in answers if answer is not None]
    round_.ended = " ".join(sorted({answer["ended"] for answer in heard}))
    broken_at = _broken_at(victim)
    if broken_at is not None and heard:
        round_.naming_seconds = max(answer["at"] for answer in heard) - broken_at
    if fault.act == "freeze" and round_.happened:
        at.resume(fault.victim)
        if fault.victim in pushes:
            await asyncio.wait([pushes[fault.victim]])
            if _answer(pushes[fault.victim]) is None:
                round_.broken.append(f"{fault.victim} had no answer after it was resumed")
    for push in pushes.values():
        if not push.done():
            await asyncio.wait([push])
        push.exception()
    await _held(at, round_, version)


def _broken_at(victim: Control) -> float | None:
    """Returns the time of the fault. It is set while others are awaited."""
    return victim.broken_at


def _answer(push: asyncio.Future[dict[str, Any]]) -> dict[str, Any] | None:
    return None if push.exception() is not None else push.result()


async def _held(at: Fleet, round_: Round, version: int) -> None:
    """Checks the versions and the weights of all ranks that live."""
    serving: dict[str, set[int]] = {}
    for instance in INSTANCES:
        states = await _at_rest(at, instance, round_)
        for rank, state in enumerate(states):
            if state is not None and state["wrong"] and not _out_of_service(state):
                round_.broken.append(
                    f"{instance}-{rank} reports version {state['version']}, and has other bytes in "
                    f"{state['wrong']}"
                )
        if any(state is None or _out_of_service(state) for state in states):
            continue
        serving[instance] = {state["version"] for state in states if state is not None}
        if len(serving[instance]) != 1:
            round_.broken.append(f"ranks of {instance} serve the versions {serving[instance]}")
    versions = set().union(*serving.values()) if serving else {at.served}
    if len(versions) != 1:
        round_.broken.append(f"instances serve different versions: {serving}")
    if not versions <= {at.served, version}:
        round_.broken.append(f"instances serve {versions}, neither {at.served} nor {version}")
    if round_.happened and not round_.fault.decided and versions != {at.served}:
        round_.broken.append(f"{round_.fault} came before the votes; {versions} is served")
    if "committed" in round_.ended and versions != {version}:
        round_.broken.append(f"trainers were told of a commit of {version}; {versions} is served")
    if round_.ended == "weight-update-aborted" and versions != {at.served}:
        round_.broken.append(f"trainers were told of an abort; {versions} is served")
    at.served = max(versions)


def _out_of_service(state: dict[str, Any]) -> bool:
    return state["error"] is not None or state["partial"] is not None


async def _at_rest(at: Fleet, instance: str, round_: Round) -> list[dict[str, Any] | None]:
    """Waits until the instance's leader is neither in doubt nor applies. Returns the ranks'
    states."""
    names = [f"{instance}-{rank}" for rank in range(INSTANCES[instance])]
    states: list[dict[str, Any] | None] = []
    for _ in range(round(PATIENCE / _PAUSE)):
        states = [await at.state(name) for name in names]
        leader = states[0]
        if leader is None or leader["idle"] or leader["error"] is not None:
            return states
        await asyncio.sleep(_PAUSE)
    round_.broken.append(f"{instance} stays in doubt or applies for too long: {states}")
    return states


async def _repaired(at: Fleet, round_: Round) -> None:
    """Starts ended processes again. Then runs an update without a fault, which has to reach all
    members, also those that have a part of the previous update."""
    if round_.broken:
        return
    for instance, ranks in INSTANCES.items():
        states = [await at.state(f"{instance}-{rank}") for rank in range(ranks)]
        if any(state is None or state["error"] is not None for state in states):
            await at.start_instance(instance)
    if not all(at.runs(name) for name in _TRAINER_NAMES):
        await at.start_trainers()
    for name in (*_TRAINER_NAMES, *(f"{i}-{r}" for i, n in INSTANCES.items() for r in range(n))):
        # A fault that the update did not reach must not happen in the next one.
        await at.control(name).ask(do="break", on="", kind="", act="kill", count=1)
    await at.joined()
    version = at.served + 1
    pushes = await asyncio.gather(
        *(
            at.control(name).ask(_HANG_SECONDS, do="push", version=version)
            for name in _TRAINER_NAMES
        )
    )
    for name, answer in zip(_TRAINER_NAMES, pushes, strict=True):
        if answer["ended"] != "committed" or set(answer["instances"].values()) != {"committed"}:
            round_.broken.append(f"the next update, without a fault: {name} got {answer}")
    for instance, ranks in INSTANCES.items():
        for rank in range(ranks):
            state = await at.state(f"{instance}-{rank}")
            served = state is not None and state["version"] == version
            if state is None or not served or state["wrong"] or _out_of_service(state):
                round_.broken.append(f"after the next update {instance}-{rank} is {state}")
    at.served = version
