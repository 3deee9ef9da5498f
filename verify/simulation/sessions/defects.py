"""Deliberate defects. The checks must find each within some hundreds of seeds; otherwise they prove
nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final
from unittest import mock

from kvxfer.kv.admission import CurrentIdentity
from kvxfer.kv.decode_session import DecodeSession
from kvxfer.kv.inbound import Inbound
from kvxfer.kv.message_handler import MessageHandler
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.kv.prefill_side import PrefillSide
from kvxfer.kv.session_state import DecodeEvent, Lease


@dataclass(frozen=True)
class Defects:
    """Defects of the simulated engines, and `patches` of the real sessions."""

    lands_late: bool = False
    splits_groups: bool = False
    forgets_copies: bool = False
    patches: tuple[tuple[type, str, Callable[..., Any]], ...] = ()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in self.patches:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            yield


def _patch(owner: type, name: str, replacement: Callable[..., Any]) -> Defects:
    return replace(NONE, patches=((owner, name, replacement),))


_give_up_decode = DecodeSession._give_up


def _frees_target_at_once(session: DecodeSession, *arguments: Any, **named: Any) -> None:
    _give_up_decode(session, *arguments, **named)
    if session._error is not None:
        session._blocks.release()


_give_up_prefill = PrefillSession._give_up


def _frees_source_at_once(session: PrefillSession, event: Any, error: Any, why: str = "") -> None:
    _give_up_prefill(session, event, error, why)
    if session._error is not None:
        session._pin.release()


async def _does_not_count(inbound: Inbound, total: int) -> None:
    if inbound._machine.allows(DecodeEvent.COUNTED):
        inbound.counter.release()
        inbound._machine.advance(DecodeEvent.COUNTED)
        inbound._session._counted()


def _cancels_silently(rendezvous: PrefillSide, pair: Any, transfer_id: str, reason: str) -> None:
    pass


_renew = Lease.renew


def _never_ends(lease: Lease, seconds: float) -> None:
    _renew(lease, seconds)
    lease.end()


def _does_nothing(*_: object, **__: object) -> None:
    pass


NONE: Final = Defects()
DEFECTS: Final[dict[str, Defects]] = {
    "fence and revocation ignored": Defects(lands_late=True),
    "groups split over two queue pairs": Defects(splits_groups=True),
    "copies of a GPU not waited for": Defects(forgets_copies=True),
    "epoch not checked": _patch(CurrentIdentity, "require", _does_nothing),
    "target blocks freed at cancel": _patch(DecodeSession, "_give_up", _frees_target_at_once),
    "source blocks freed at cancel": _patch(PrefillSession, "_give_up", _frees_source_at_once),
    "count ignored": _patch(Inbound, "_count", _does_not_count),
    "CANCEL ignored": _patch(PrefillSide, "cancel", _cancels_silently),
    "lost peer ignored": _patch(MessageHandler, "peer_lost", _does_nothing),
    "lease without an end": _patch(Lease, "renew", _never_ends),
}
