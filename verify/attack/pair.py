"""A prefill and a decode worker, each in a process, as the attacker sees them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvxfer.ticket import Ticket, sign_ticket
from verify.processes.worker import PATIENCE, WorkerProcess

from .hostile import Target
from .worker import EPOCH, KEY


class Victim(WorkerProcess):
    """A worker that is attacked."""

    def __init__(self, instance: str, fabric: str, *options: str) -> None:
        super().__init__("verify.attack.worker", instance, fabric, *options)

    @property
    def target(self) -> Target:
        return Target.of(self.address)

    def state(self) -> dict[str, Any]:
        return self.ask("state")


@dataclass
class Pair:
    """Both workers of one fabric."""

    fabric: str
    prefill: Victim
    decode: Victim

    def ticket(self, **changes: Any) -> str:
        return sign_ticket(self.claims(**changes), changes.get("key", KEY))

    def claims(self, **changes: Any) -> Ticket:
        changes.pop("key", None)
        said: dict[str, Any] = {
            "transfer_id": uuid.uuid4().hex,
            "request_id": "attack",
            "prefill_id": self.prefill.name,
            "prefill_epoch": EPOCH,
            "decode_id": self.decode.name,
            "decode_epoch": EPOCH,
            "expires_at": time.time() + 600,
        }
        return Ticket(**{**said, **changes})

    def transfer(self, number: int = 1) -> list[float]:
        """Runs `number` honest transfers of HONEST_BLOCKS blocks each. Returns the seconds of each.
        Raises AssertionError if one fails or has a wrong byte."""
        tickets = [self.ticket() for _ in range(number)]
        sending = self.prefill.begin("send", tickets=tickets)
        received = self.decode.ask("receive", tickets=tickets, address=self.prefill.address)
        sent = sending.result(PATIENCE)
        assert not received["errors"] and not sent["errors"], (received["errors"], sent["errors"])
        assert received["wrong"] == 0, f"{received['wrong']} wrong bytes in honest transfers"
        return list(received["seconds"])

    def changed(self) -> int:
        """Returns the number of changed bytes outside the memory of honest transfers, on both
        sides."""
        return sum(int(one.ask("changed")["changed"]) for one in (self.prefill, self.decode))


@contextmanager
def workers(fabric: str, *options: str, met: bool = True) -> Iterator[Pair]:
    """Starts a pair, and runs one transfer. Without `met`, runs none: the workers have not
    connected yet."""
    with (
        Victim("prefill", fabric, *options) as prefill,
        Victim("decode", fabric, *options) as decode,
    ):
        pair = Pair(fabric, prefill, decode)
        if met:
            pair.transfer()
        yield pair
