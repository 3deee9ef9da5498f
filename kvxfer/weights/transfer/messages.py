"""What the members of a weight update say to each other: frozen typed values as tagged msgpack.

The engine keeps the order of messages of one peer. Writes are not ordered with messages: SENT
carries the total, and the count decides.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvxfer.errors import KvxferError, ProtocolError, by_code
from kvxfer.unreadable import UNREADABLE
from kvxfer.weights.holdings import Holdings
from kvxfer.weights.plan.settings import ScheduleSettings
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer.settings import Policy

VERSION: Final = 1
_FRAGMENT_BYTES: Final = 960 << 10  # the engine's messages have at most 1 MiB
_MOST_FRAGMENTS: Final = 4096
_COMPRESSED_FROM: Final = 4096
_MOST_BYTES: Final = 4 << 30

UpdateId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 14)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=1e6)]


class Said(msgspec.Struct, frozen=True):
    """An error, as it is told."""

    code: str
    text: str

    def error(self) -> KvxferError:
        try:
            return by_code(self.code)(self.text)
        except TypeError:  # one that is made of more than a text
            return KvxferError(f"{self.text} ({self.code})")


def said(error: BaseException) -> Said:
    """What is told of an error, also of one that is not kvxfer's."""
    if isinstance(error, KvxferError):
        return Said(error.code, str(error))
    return Said(KvxferError.code, f"{type(error).__name__}: {error}")


# --- joining and planning


class Invite(msgspec.Struct, frozen=True, tag="invite"):
    """coordinator → inference rank that it has dialed: join."""

    version: int = VERSION


class JoinTraining(msgspec.Struct, frozen=True, tag="join-training"):
    """training rank → coordinator."""

    rank: Rank
    holdings: Holdings
    version: int = VERSION


class JoinInference(msgspec.Struct, frozen=True, tag="join-inference"):
    """inference rank → coordinator: its instance, its place in it, and where it is written to.

    `by_message`: its leader commits when it is told to. Otherwise the inference engine's control
    path does. `serves`: the version that it serves, or did before it went out of service as it has
    some waves of an update (`partial`). `arena_bytes`: that it stages at once, where it takes
    updates in waves.
    """

    instance_id: str
    rank: Rank
    ranks: Annotated[int, Meta(ge=1, le=1 << 14)]
    holdings: Holdings
    address: str
    by_message: bool
    serves: int
    partial: bool = False
    arena_bytes: int | None = None
    version: int = VERSION


def rank_name(instance_id: str, rank: int) -> str:
    """What errors call an inference rank."""
    return f"rank {rank} of {instance_id!r}"


class Target(msgspec.Struct, frozen=True):
    """An inference rank, as all members know it."""

    instance_id: str
    rank: Rank
    address: str

    @property
    def name(self) -> str:
        return rank_name(self.instance_id, self.rank)


class Plan(msgspec.Struct, frozen=True, tag="plan"):
    """coordinator → member: all that the plan is a function of. `train` and `infer` are the
    holdings of all ranks, in order; `targets` are the inference ranks."""

    plan_id: str
    number: int
    """Of the member, on its side."""
    train: tuple[Holdings, ...]
    infer: tuple[Holdings, ...]
    targets: tuple[Target, ...]
    settings: ScheduleSettings
    waves: tuple[tuple[str, ...], ...] = ()
    """The parameters of each wave, at inference; () for a single one that has all."""


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """member → coordinator: its plan is made, and a training rank is connected to all that it
    writes to; or not, and why."""

    plan_id: str
    failed: Said | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """training rank → inference rank: by this connection I write what the plan says of `number`."""

    plan_id: str
    number: int


# --- one update. Each of its waves has an id: the last one that of the update.


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """training rank → coordinator: my memory has this version, and may be read; or I cannot send
    it, and why. `serial` rises with each push of the rank."""

    weights: int
    serial: int
    refused: Said | None = None


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """training rank → coordinator: my memory may not be read any more."""

    serial: int


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """coordinator → inference rank: receive. `leaders`: whom to ask where the coordinator is lost
    after this rank has staged."""

    update_id: UpdateId
    plan_id: str
    weights: int
    seconds: Seconds
    digests: bool
    leaders: tuple[str, ...]
    policy: Policy | None = None
    wave: int = 0
    waves: Annotated[int, Meta(ge=1)] = 1

    @property
    def last(self) -> bool:
        return self.wave + 1 == self.waves


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """inference rank → training rank: write into the arena, with this immediate."""

    update_id: UpdateId
    imm: int
    arena: bytes


class Push(msgspec.Struct, frozen=True, tag="push"):
    """coordinator → training rank: write a wave to these inference ranks, by number in the plan."""

    update_id: UpdateId
    plan_id: str
    serial: int
    seconds: Seconds
    digests: bool
    receivers: tuple[int, ...]
    wave: int = 0
    last: bool = True


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """training rank → inference rank: all is written; so many immediates, and the digest."""

    update_id: UpdateId
    immediates: int
    digest: int | None


class Read(msgspec.Struct, frozen=True, tag="read"):
    """training rank → coordinator: my memory has been read."""

    update_id: UpdateId


class Vote(msgspec.Struct, frozen=True, tag="vote"):
    """inference rank → coordinator: everything is here, and right; the vote for this update."""

    update_id: UpdateId
    digest: str | None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """member → coordinator: the vote against it."""

    update_id: UpdateId
    why: Said


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """coordinator → leader: apply it to the instance."""

    update_id: UpdateId


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """coordinator → member: nothing of it is applied."""

    update_id: UpdateId
    why: Said


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """inference rank → coordinator: it serves the update now; or it failed while it applied it, and
    its instance has left service."""

    update_id: UpdateId
    pause_seconds: float | None = None
    failed: Said | None = None


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """coordinator → training rank: how it ended."""

    serial: int
    report: UpdateReport


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """leader → leader: my coordinator is lost; how did it end?"""

    update_id: UpdateId


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """leader → leader. "waiting": staged, and its coordinator is there. "doubt": staged, and its
    coordinator is lost, too. "aborted" also where it had not staged; it will not any more."""

    update_id: UpdateId
    state: Literal["committed", "aborted", "waiting", "doubt"]


class _Fragment(msgspec.Struct, frozen=True, tag="fragment"):
    """Of a message that is longer than the engine's."""

    at: Annotated[int, Meta(ge=0, lt=_MOST_FRAGMENTS)]
    of: Annotated[int, Meta(ge=1, le=_MOST_FRAGMENTS)]
    data: bytes


class _Compressed(msgspec.Struct, frozen=True, tag="compressed"):
    """Holdings repeat themselves."""

    data: bytes


Message: TypeAlias = (
    Invite
    | JoinTraining
    | JoinInference
    | Plan
    | Planned
    | Hello
    | Ready
    | Withdraw
    | Prepare
    | Grant
    | Push
    | Sent
    | Read
    | Vote
    | Failed
    | Commit
    | Abort
    | Applied
    | Settled
    | Ask
    | Tell
)

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Message | _Fragment | _Compressed]] = (
    msgspec.msgpack.Decoder(Message | _Fragment | _Compressed)
)


def encode(message: Message) -> Iterator[bytes]:
    """The message, as one message of the engine or several."""
    data = _ENCODER.encode(message)
    if len(data) >= _COMPRESSED_FROM:
        data = _ENCODER.encode(_Compressed(zlib.compress(data, 1)))
    if len(data) <= _FRAGMENT_BYTES:
        yield data
        return
    pieces = [data[at : at + _FRAGMENT_BYTES] for at in range(0, len(data), _FRAGMENT_BYTES)]
    for at, piece in enumerate(pieces):
        yield _ENCODER.encode(_Fragment(at, len(pieces), piece))


class Inbox:
    """Of one peer: puts its fragments together."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def take(self, data: bytes, name: str) -> Message | None:
        """The message that is complete with this, if one is; `name` is the peer. Raises
        ProtocolError."""
        try:
            message = _DECODER.decode(data)
            if isinstance(message, _Fragment):
                if message.at != len(self._pieces):
                    raise ProtocolError(f"{name!r} sent fragment {message.at} out of order")
                self._pieces.append(message.data)
                if message.at + 1 < message.of:
                    return None
                whole, self._pieces = b"".join(self._pieces), []
                message = _DECODER.decode(whole)
            if isinstance(message, _Compressed):
                expand = zlib.decompressobj()
                message = _DECODER.decode(expand.decompress(message.data, _MOST_BYTES))
        except (*UNREADABLE, zlib.error) as error:
            raise ProtocolError(f"{name!r} sent a message that cannot be read: {error}") from error
        if isinstance(message, _Fragment | _Compressed):
            raise ProtocolError(f"{name!r} sent a fragment of a fragment")
        return message
