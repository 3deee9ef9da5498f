"""A prefill and a decode worker in processes of their own, and what the attacker sees of them."""

from __future__ import annotations

import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvxfer.ticket import Ticket, sign_ticket

from .hostile import Target
from .worker import EPOCH, KEY

PATIENCE = 60.0


class Victim:
    """A worker process. Any thread may ask; answers come in any order."""

    def __init__(self, instance: str, fabric: str, *options: str) -> None:
        root = Path(__file__).parent.parent.parent
        self.instance = instance
        self.process = subprocess.Popen(
            [sys.executable, "-m", "verify.attack.worker", instance, fabric, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        )
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        ready: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, args=(ready,), daemon=True).start()
        self.address = ready.get(timeout=PATIENCE)

    @property
    def target(self) -> Target:
        return Target.of(self.address)

    def _listen(self, ready: queue.Queue[str]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "address" in answer:
                ready.put(answer["address"])
            else:
                self._waiting.pop(answer.pop("id")).set_result(answer)
        for one in self._waiting.values():
            one.set_exception(EOFError(f"the {self.instance} worker has ended"))

    def begin(self, do: str, **arguments: Any) -> Future[dict[str, Any]]:
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            ident = next(self._ids)
            self._waiting[ident] = future
            assert self.process.stdin is not None
            line = json.dumps({"id": ident, "do": do, **arguments})
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        return future

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        return self.begin(do, **arguments).result(PATIENCE)

    def state(self) -> dict[str, Any]:
        return self.ask("state")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


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
            "prefill_id": self.prefill.instance,
            "prefill_epoch": EPOCH,
            "decode_id": self.decode.instance,
            "decode_epoch": EPOCH,
            "expires_at": time.time() + 600,
        }
        return Ticket(**{**said, **changes})

    def transfer(self, number: int = 1) -> list[float]:
        """So many honest transfers of HONEST_BLOCKS; the seconds that each took. Raises
        AssertionError where one fails or a byte of it is wrong."""
        tickets = [self.ticket() for _ in range(number)]
        sending = self.prefill.begin("send", tickets=tickets)
        received = self.decode.ask("receive", tickets=tickets, address=self.prefill.address)
        sent = sending.result(PATIENCE)
        assert not received["errors"] and not sent["errors"], (received["errors"], sent["errors"])
        assert received["wrong"] == 0, f"{received['wrong']} wrong bytes in honest transfers"
        return list(received["seconds"])

    def changed(self) -> int:
        """Bytes changed in what no honest transfer uses, on both sides."""
        return sum(int(one.ask("changed")["changed"]) for one in (self.prefill, self.decode))


@contextmanager
def workers(fabric: str, *options: str, met: bool = True) -> Iterator[Pair]:
    """A pair that has made one transfer, unless it is not to have met."""
    prefill, decode = Victim("prefill", fabric, *options), None
    try:
        decode = Victim("decode", fabric, *options)
        pair = Pair(fabric, prefill, decode)
        if met:
            pair.transfer()
        yield pair
    finally:
        for one in (prefill, decode):
            if one is not None:
                one.end()
