"""At which message a member is killed or frozen."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Act = Literal["kill", "freeze"]
On = Literal["send", "receive", "apply"]


class Fault(NamedTuple):
    """Of one member: when it sends its next message of a kind, or has been given one."""

    victim: str
    """"trainer-0" hosts the coordinator; "pair-0" is the leader of the instance of two ranks."""
    on: On
    kind: str
    """The message's class; of "apply", what has been copied: "none", "half" or "all"."""
    act: Act
    decided: bool = False
    """Whether the update may have been decided by then."""

    @property
    def stage(self) -> str:
        return f"{self.on} {self.kind}"


_TRAINER: Final[tuple[tuple[On, str], ...]] = (
    ("send", "Ready"),
    ("receive", "Push"),
    ("receive", "Grant"),
    ("send", "Sent"),
    ("send", "Read"),
)
_RECEIVER: Final[tuple[tuple[On, str], ...]] = (
    ("receive", "Prepare"),
    ("send", "Grant"),
    ("receive", "Sent"),
    ("send", "Vote"),
)
_PLANNING: Final[tuple[tuple[On, str], ...]] = (("receive", "Plan"), ("send", "Planned"))
_APPLYING: Final[tuple[tuple[On, str], ...]] = (
    ("apply", "none"),
    ("apply", "half"),
    ("apply", "all"),
)


def catalogue() -> list[Fault]:
    """Every fault there is, of both acts."""
    found = []
    acts: tuple[Act, ...] = ("kill", "freeze")
    decided: tuple[tuple[On, str], ...] = (
        ("send", "Commit"),
        ("receive", "Applied"),
        ("send", "Settled"),
    )
    committing: tuple[tuple[On, str], ...] = (("receive", "Commit"), ("send", "Applied"))
    for act in acts:
        for victim in ("trainer-0", "trainer-1"):
            found += [Fault(victim, *at, act, at[1] == "Read") for at in (*_PLANNING, *_TRAINER)]
        for victim in ("pair-0", "pair-1", "single-0"):
            found += [Fault(victim, *at, act) for at in (*_PLANNING, *_RECEIVER)]
            found += [Fault(victim, *at, act, True) for at in _APPLYING]
        # Of the coordinator: before and between its messages.
        found += [Fault("trainer-0", "send", kind, act) for kind in ("Plan", "Prepare", "Push")]
        found += [Fault("trainer-0", "receive", "Vote", act)]
        found += [Fault("trainer-0", *at, act, True) for at in decided]
        found += [Fault(v, *at, act, True) for v in ("pair-0", "single-0") for at in committing]
    return found
