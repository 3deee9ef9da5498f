"""Attacks on the control plane's REST API: callers without rights, tickets, altered tables."""

from __future__ import annotations

import base64
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import httpx2
import msgspec

from kvxfer.instance_secret import HEADER
from kvxfer.ticket import Ticket, sign_ticket, verify_ticket
from kvxfer.web.tokens import Scope, watch_tokens
from verify.processes.block_tables import block_table
from verify.processes.control_plane import CLUSTER_KEY, RunningControlPlane, worker

from .attack import Row, Tried

_MANY: Final = 40
_LEASE_SECONDS: Final = 3600.0  # long, as the workers send no heartbeats


def _token(scope: str) -> str:
    return f"token-of-the-{scope}"


@dataclass(frozen=True, slots=True)
class Plane:
    """A running control plane with a prefill and a decode worker."""

    client: httpx2.Client
    leases: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The answer to each worker's registration."""

    def call(
        self, scope: str, method: str, path: str, secret: str | None = None, **arguments: Any
    ) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {_token(scope)}"}
        if secret is not None:
            headers[HEADER] = secret
        return self.client.request(method, path, headers=headers, **arguments)

    def open(self) -> Ticket:
        """Opens a transfer. Returns its ticket."""
        answer = self.call("router", "POST", "/v1/transfers", json={})
        assert answer.status_code == 201, answer.text
        return verify_ticket(answer.json()["ticket"], CLUSTER_KEY, now=time.time())

    def put(self, ticket: Ticket, body: dict[str, Any]) -> str:
        """Puts a block table. Returns the code of the error, or ""."""
        path = f"/v1/transfers/{ticket.transfer_id}/block-table"
        return _code(self.call("router", "POST", path, json=body))

    def errors(self) -> dict[str, int]:
        """Returns the number of errors by code, from the metrics."""
        found = {}
        for line in self.call("monitor", "GET", "/metrics").text.splitlines():
            if line.startswith('kvxfer_http_errors_total{code="'):
                code, value = line.removeprefix('kvxfer_http_errors_total{code="').split('"} ')
                found[code] = int(float(value))
        return found


@contextmanager
def control_plane() -> Iterator[Plane]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokens")
        file.write_text("".join(f"the-{scope} {scope} {_token(scope)}\n" for scope in Scope))
        with (
            RunningControlPlane(tokens=watch_tokens(file), lease_seconds=_LEASE_SECONDS) as running,
            httpx2.Client(base_url=running.url, timeout=20) as client,
        ):
            plane = Plane(client)
            for name, role in (("p", "prefill"), ("d", "decode")):
                body = msgspec.json.decode(msgspec.json.encode(worker(name, role)))
                body |= {"state": "ready", "incarnation": "", "takes_secret": True}
                answer = plane.call("worker", "POST", "/v1/instances", json=body)
                assert answer.status_code == 201, answer.text
                plane.leases[name] = answer.json()
            yield plane


def without_rights(plane: Plane, rng: random.Random) -> Tried:
    """Sends no token, unknown tokens, and tokens of another scope."""
    wrong = [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic dXNlcjpwYXNz"},
        {"Authorization": f"Bearer {_token('monitor')}"},
        {"Authorization": f"Bearer {_token('worker')}"},
    ]
    codes = []
    for index in range(_MANY):
        headers = wrong[index % 6] if index % 6 < 5 else {"Authorization": f"Bearer {rng.random()}"}
        codes.append(_code(plane.client.post("/v1/transfers", json={}, headers=headers)))
    return _refused(codes, ("unauthenticated", "forbidden", "rate-limited"))


def other_workers(plane: Plane, rng: random.Random) -> Tried:
    """Acts as another instance, with the token that all workers share and the right epochs."""
    codes = []
    for index in range(_MANY):
        name, own = ("p", "d") if index % 2 else ("d", "p")
        epoch = plane.call("worker", "GET", f"/v1/instances/{name}").json()["epoch"]
        secret = (None, plane.leases[own]["secret"], rng.randbytes(32).hex())[index % 3]
        path = f"/v1/instances/{name}"
        call: dict[str, Any]
        match index % 4:
            case 0:
                method, path, call = "PUT", f"{path}/heartbeat", {"json": {"epoch": epoch}}
            case 1:
                body = {"epoch": epoch, "reset": True}
                method, path, call = "POST", f"{path}/blocks", {"json": body}
            case 2:
                method, path, call = "POST", f"{path}/drain", {"json": {"deadline_seconds": 0}}
            case _:
                method, call = "DELETE", {"params": {"epoch": epoch}}
        codes.append(_code(plane.call("worker", method, path, secret, **call)))
    return _refused(codes, ("forbidden",))


def tickets(plane: Plane, rng: random.Random) -> Tried:
    """Puts block tables whose tickets are expired, signed with another key, of an earlier epoch, or
    of another transfer."""
    codes = []
    for index in range(_MANY):
        ticket = plane.open()
        match index % 4:
            case 0:
                table = block_table(replace(ticket, expires_at=time.time() - 60))
            case 1:
                table = block_table(ticket, ticket=sign_ticket(ticket, rng.randbytes(32)))
            case 2:
                table = block_table(replace(ticket, prefill_epoch=ticket.prefill_epoch - 1))
            case _:
                table = block_table(plane.open())  # the table of another transfer
        codes.append(plane.put(ticket, _as_json(table)))
    return _refused(codes, ("ticket-expired", "ticket-invalid", "block-table-mismatch"))


def altered_tables(plane: Plane, rng: random.Random) -> Tried:
    """Changes or replaces block tables that decode has signed, as a router with the token could."""
    codes = []
    for index in range(_MANY):
        ticket = plane.open()
        body = _as_json(block_table(ticket))
        offer = body["offer"]
        match index % 6:
            case 0:
                offer["blocks"] = _altered(offer["blocks"], rng)
            case 1:
                offer["grants"][rng.randrange(4)] = _altered(offer["grants"][0], rng)
            case 2:
                offer["imm"] += 1
            case 3:
                offer["lease_seconds"] *= 100
            case 4:
                body["mac"] = _altered(body["mac"], rng)
            case _:
                assert plane.put(ticket, body) == ""
                body = _as_json(block_table(ticket, imm=7))  # a second one
        codes.append(plane.put(ticket, body))
    return _refused(codes, ("ticket-invalid", "block-table-exists"))


def _as_json(table: Any) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(table))
    return body


def _altered(data: str, rng: random.Random) -> str:
    raw = bytearray(base64.b64decode(data))
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return base64.b64encode(raw).decode()


def _code(answer: httpx2.Response) -> str:
    return "" if answer.is_success else str(answer.json()["code"])


def _refused(codes: list[str], expected: tuple[str, ...]) -> Tried:
    return Tried(len(codes), sum(code in expected for code in codes), frozenset(codes))


ATTACKS: Final[tuple[tuple[str, Callable[[Plane, random.Random], Tried]], ...]] = (
    ("REST: callers without rights", without_rights),
    ("REST: calls as another instance", other_workers),
    ("REST: forged, foreign, expired tickets", tickets),
    ("REST: altered block tables", altered_tables),
)


def run(
    name: str, attack: Callable[[Plane, random.Random], Tried], plane: Plane, rng: random.Random
) -> Row:
    before = plane.errors()
    tried = attack(plane, rng)
    grown = {code: n - before.get(code, 0) for code, n in plane.errors().items()}
    counted = {code: n for code, n in grown.items() if n and code in tried.errors}
    row = Row(name, "http", tried.attempts, tried.refused)
    row.metric = f"kvxfer_http_errors: {', '.join(sorted(counted))}"
    row.counted = sum(counted.values())
    if row.refused < row.attempts:
        row.problems.append(f"{row.attempts - row.refused} attempts were not refused")
    if row.counted < row.attempts:
        row.problems.append(f"{row.counted} of {row.attempts} were counted")
    return row
