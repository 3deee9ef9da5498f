"""A model of the calls by which a rank asks another over a new connection."""

from __future__ import annotations

from typing import Final

from kvxfer.moe.view_messages import Answer, Ask

from .network import SILENCE, Process
from .world import World

_PAUSE_SECONDS: Final = 0.05
_DIAL_SECONDS: Final = 0.8


def ask(world: World, asker: Process, target: Process, ask: Ask, *, pause: bool) -> None:
    """Asks a rank over a new connection. The answer, or None, is an event of `asker`."""
    world.count("asked")
    done = False

    def answered(answer: Answer | None) -> None:
        nonlocal done
        if not done:
            done = True
            event = ("answer", target.rank, ask, answer)
            world.clock.after(world.network.delay(), lambda: asker.meets(event), asker)

    def unreachable() -> bool:
        return not target.runs or bool(world.network.cut_until(asker, target))

    def dial() -> None:
        if not target.alive and not target.host_gone:
            answered(None)
        elif unreachable():
            world.clock.after(_DIAL_SECONDS, redial)
        else:
            target.meets(("asked", ask, lambda answer: reply(answer)))
            watch(False)

    def redial() -> None:
        if unreachable():
            answered(None)
        else:
            dial()

    def reply(answer: Answer) -> None:
        until = world.network.cut_until(asker, target)
        if until:
            world.clock.after(until - world.clock.now + 1e-4, lambda: reply(answer))
        else:
            answered(answer)

    def watch(before: bool) -> None:
        silent = unreachable()
        if not target.alive or (silent and before):
            answered(None)
        if not done:
            world.clock.after(SILENCE, lambda: watch(silent))

    world.clock.after(
        world.network.delay() + (_PAUSE_SECONDS if pause else 0.0),
        dial,
        asker,
    )
