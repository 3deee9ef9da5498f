"""The messages at which a member is killed or frozen."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from kvxfer.weights.transfer.settings import Mode

from .content import WAVES

Act = Literal["kill", "freeze"]
On = Literal["send", "receive", "apply"]


class Fault(NamedTuple):
    """A fault of one member, when it sends or has received the nth message of a kind."""

    victim: str
    """"trainer-0" hosts the coordinator; "pair-0" is the leader of the instance of two ranks."""
    on: On
    kind: str
    """The message's class. For "apply", the share that is copied: "none", "half" or "all"."""
    act: Act
    decided: bool = False
    """Whether the update may already be decided at that time."""
    nth: int = 1
    """The number of the message among those of its kind in an update, from 1."""

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


_OF_EACH_WAVE: Final = {
    *("receive Push", "send Read", "receive Prepare", "send Vote"),
    *("receive Commit", "send Applied", "apply none", "apply half", "apply all"),
}
"""The stages that a member passes once in each wave."""


def catalogue(mode: Mode = "atomic") -> list[Fault]:
    """Returns every fault, with both acts."""
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
        # Faults of the coordinator: before and between its messages.
        found += [Fault("trainer-0", "send", kind, act) for kind in ("Plan", "Prepare", "Push")]
        found += [Fault("trainer-0", "receive", "Vote", act)]
        found += [Fault("trainer-0", *at, act, True) for at in decided]
        found += [Fault(v, *at, act, True) for v in ("pair-0", "single-0") for at in committing]
    found += [each._replace(nth=2) for each in found if _several(each)]
    if mode == "wave":
        # Faults in the later waves. An instance that has a wave may be completed to that version at
        # once, so these faults may come after the decision.
        found += [
            each._replace(nth=wave + 1, decided=True)
            for each in found
            for wave in range(1, WAVES)
            if each.nth == 1 and each.stage in _OF_EACH_WAVE
        ]
    return found


def _several(fault: Fault) -> bool:
    """Returns whether the victim sends or receives such a message more than once in an update."""
    if fault.victim.startswith("trainer"):
        kinds = {"receive Grant", "receive Vote", "receive Applied"}
        kinds |= {"send Sent", "send Prepare", "send Commit"}
    else:
        kinds = {"send Grant", "receive Sent"}
    return fault.stage in kinds
