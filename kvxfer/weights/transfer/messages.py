"""The messages between members of a weight update: frozen typed values as tagged msgpack.

The engine keeps the order of messages of one peer. Writes are not ordered with messages: SENT
carries the number of immediates, and the receiver waits until it has counted them.
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
    """An error in a message."""

    code: str
    text: str

    def error(self) -> KvxferError:
        try:
            return by_code(self.code)(self.text)
        except TypeError:  # an error that takes more than a text
            return KvxferError(f"{self.text} ({self.code})")


def said(error: BaseException) -> Said:
    """Returns the message form of an error, also of one that is not kvxfer's."""
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
    """inference rank → coordinator: its instance, its rank there, and the address to write to.

    `by_message`: at rank 0, whether the instance commits on COMMIT; otherwise the inference
    engine's control path commits. `serves`: the version that it serves, or served before
    it went out of service with some waves of an update (`partial`). `arena_bytes`: the most bytes
    that it stages at once; None if it takes no waves.
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
    """Returns the name of an inference rank in errors."""
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
    """coordinator → member: the inputs of the plan. `train` and `infer` are the holdings of all
    ranks, in order; `targets` are the inference ranks."""

    plan_id: str
    number: int
    """The number of the member on its side."""
    train: tuple[Holdings, ...]
    infer: tuple[Holdings, ...]
    targets: tuple[Target, ...]
    settings: ScheduleSettings
    waves: tuple[tuple[str, ...], ...] = ()
    """The parameters of each wave, at inference; () for a single wave with all."""


class Planned(msgspec.Struct, frozen=True, tag="planned"):
    """member → coordinator: it has made the plan, and a training rank is connected to all that it
    writes to; or why that failed."""

    plan_id: str
    failed: Said | None = None


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """training rank → inference rank: this connection is for the writes of rank `number` of the
    plan."""

    plan_id: str
    number: int


# --- one update. Each of its waves has an id; the last one has that of the update.


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
    """coordinator → inference rank: receive the update or wave. `leaders`: the addresses to ask for
    the outcome if the coordinator is lost after this rank has staged."""

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
    """training rank → inference rank: all is written; the number of immediates, and the digest."""

    update_id: UpdateId
    immediates: int
    digest: int | None


class Read(msgspec.Struct, frozen=True, tag="read"):
    """training rank → coordinator: my memory has been read."""

    update_id: UpdateId


class Vote(msgspec.Struct, frozen=True, tag="vote"):
    """inference rank → coordinator: the vote for this update: everything has arrived, and is
    right."""

    update_id: UpdateId
    digest: str | None


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """member → coordinator: the vote against the update, which failed at this member."""

    update_id: UpdateId
    why: Said


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """coordinator → leader: apply the update to the instance."""

    update_id: UpdateId


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """coordinator → member: drop the update or wave."""

    update_id: UpdateId
    why: Said


class Applied(msgspec.Struct, frozen=True, tag="applied"):
    """inference rank → coordinator: it serves the update now, or has applied the wave; or that
    failed, and its instance has left service."""

    update_id: UpdateId
    pause_seconds: float | None = None
    failed: Said | None = None


class Settled(msgspec.Struct, frozen=True, tag="settled"):
    """coordinator → training rank: the outcome of its push."""

    serial: int
    report: UpdateReport


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """leader → leader: my coordinator is lost; how did the update end?"""

    update_id: UpdateId


class Tell(msgspec.Struct, frozen=True, tag="tell"):
    """leader → leader: the answer to Ask. "waiting": staged, and its coordinator is connected.
    "doubt": staged, and its coordinator is lost, too. "aborted": also if it had not staged the
    update, which it then refuses."""

    update_id: UpdateId
    state: Literal["committed", "aborted", "waiting", "doubt"]


class _Fragment(msgspec.Struct, frozen=True, tag="fragment"):
    """A part of a message that is longer than those of the engine."""

    at: Annotated[int, Meta(ge=0, lt=_MOST_FRAGMENTS)]
    of: Annotated[int, Meta(ge=1, le=_MOST_FRAGMENTS)]
    data: bytes


class _Compressed(msgspec.Struct, frozen=True, tag="compressed"):
    """A compressed message: holdings are repetitive."""

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
    """Yields the message as one or several messages of the engine."""
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
    """The incoming messages of one peer; joins fragments."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def take(self, data: bytes, name: str) -> Message | None:
        """Takes a message of the engine from the peer `name`. Returns the message that it
        completes, if any. Raises ProtocolError."""
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
