"""Requests between a prefill and a decode instance, as SGLang's scheduler drives them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from kvxfer.connectors.sglang.introduction import sign_introduction
from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.engine import Engine
from kvxfer.errors import (
    ConnectFailed,
    InvalidArgument,
    LeaseExpired,
    PeerLost,
    TicketExpired,
    TicketInvalid,
    TransferCancelled,
)
from kvxfer.instances import InstanceSpec, Role
from kvxfer.kv.cache import KvCache
from kvxfer.prompt_digest import prompt_digest
from tests.connectors.sglang.instances import PAGES, Instance, Two, ended, instance, two, until
from tests.topology import machines
from verify.processes.control_plane import RunningControlPlane

pytestmark = pytest.mark.native

ROOM = Room(4711, prompt_digest([1, 2, 3]))
SAME_NUMBER = Room(4711, prompt_digest([9]))


@pytest.fixture
def both() -> Iterator[Two]:
    with two() as instances:
        yield instances


@pytest.mark.parametrize("decode_first", [True, False])
def test_pages_and_metadata_arrive_chunk_by_chunk(both: Two, decode_first: bool) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    if decode_first:
        receiver.receive(ROOM, [8, 2, 5], 3)
    sender.begin(ROOM, 3)
    if not decode_first:
        assert sender.progress is Progress.BOOTSTRAPPING
        receiver.receive(ROOM, [8, 2, 5], 3)
    until(lambda: sender.progress is Progress.WAITING)
    sender.send([3, 9], 1)
    assert sender.progress is Progress.TRANSFERRING
    assert not any(row.any() for row in both.decode.rows), "the transfer is not complete"
    sender.send([1], 1)
    ended(sender, receiver)
    assert (sender.progress, receiver.progress) == (Progress.SUCCESS, Progress.SUCCESS)
    for ours, theirs in zip(both.prefill.pool, both.decode.pool, strict=True):
        assert (ours[[3, 9, 1]] == theirs[[8, 2, 5]]).all()
        assert not theirs[sorted(set(range(PAGES)) - {8, 2, 5})].any()
    for ours, theirs in zip(both.prefill.rows, both.decode.rows, strict=True):
        assert (ours[1] == theirs[3]).all()
        assert not theirs[:3].any()


def test_a_room_never_gives_the_cache_of_another_prompt(both: Two) -> None:
    sender, receiver, thief = both.prefill.outgoing(), both.incoming(), both.incoming()
    sender.begin(ROOM, 2)
    thief.receive(SAME_NUMBER, [0, 1], 0)
    ended(thief)
    assert isinstance(thief.error, TransferCancelled)
    assert "room 4711 is that of another prompt" in str(thief.error)
    receiver.receive(ROOM, [2, 3], 0)
    until(lambda: sender.progress is Progress.WAITING)
    sender.send([5, 6], 0)
    ended(sender, receiver)
    assert (sender.progress, receiver.progress) == (Progress.SUCCESS, Progress.SUCCESS)
    assert not any(plane[[0, 1]].any() for plane in both.decode.pool)


def test_a_thief_that_comes_first_is_refused_when_the_request_comes(both: Two) -> None:
    thief = both.incoming()
    thief.receive(SAME_NUMBER, [0, 1], 0)
    until(lambda: both.prefill.agent.rooms._offers)
    sender = both.prefill.outgoing()
    sender.begin(ROOM, 2)
    ended(thief)
    assert "room 4711 is that of another prompt" in str(thief.error)
    assert sender.progress is Progress.BOOTSTRAPPING


def test_a_room_can_be_used_once(both: Two) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    sender.begin(ROOM, 1)
    receiver.receive(ROOM, [2], 0)
    until(lambda: sender.progress is Progress.WAITING)
    sender.send([5], 0)
    ended(sender, receiver)
    again = both.incoming()
    again.receive(ROOM, [3], 0)
    ended(again)
    assert isinstance(again.error, TicketInvalid)
    assert "already used" in str(again.error)
    assert not any(plane[3].any() for plane in both.decode.pool)


def test_two_requests_of_prefill_cannot_wait_in_one_room(both: Two) -> None:
    first, second = both.prefill.outgoing(), both.prefill.outgoing()
    first.begin(ROOM, 1)
    second.begin(SAME_NUMBER, 1)
    ended(second)
    assert isinstance(second.error, InvalidArgument)
    assert first.progress is Progress.BOOTSTRAPPING


@pytest.mark.parametrize("sent", [0, 1])
def test_decode_fails_at_once_when_prefill_is_aborted(both: Two, sent: int) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    sender.begin(ROOM, 2)
    receiver.receive(ROOM, [2, 3], 0)
    until(lambda: sender.progress is Progress.WAITING)
    if sent:
        sender.send([5], 0)
    sender.abort("the client has left")
    assert sender.progress is Progress.FAILED, "nothing reads the pages when abort() returns"
    ended(receiver)
    assert "the client has left" in str(receiver.error)


def test_an_offer_for_a_request_that_was_aborted_is_refused(both: Two) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    sender.begin(ROOM, 1)
    sender.abort("the client has left")
    assert sender.progress is Progress.FAILED
    receiver.receive(ROOM, [2], 0)
    ended(receiver)
    assert "aborted on prefill" in str(receiver.error)


def test_prefill_fails_at_once_when_decode_is_aborted(both: Two) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    sender.begin(ROOM, 2)
    receiver.receive(ROOM, [2, 3], 0)
    until(lambda: sender.progress is Progress.WAITING)
    sender.send([5], 0)
    receiver.abort("the client has left")
    ended(sender, receiver)
    assert isinstance(receiver.error, TransferCancelled)
    assert isinstance(sender.error, TransferCancelled)
    landed = [plane.copy() for plane in both.decode.pool]
    sender.send([6], 0)
    for before, after in zip(landed, both.decode.pool, strict=True):
        assert (before == after).all()


def test_a_request_that_was_not_begun_is_aborted_at_once(both: Two) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    sender.abort("left")
    receiver.abort("left")
    assert (sender.progress, receiver.progress) == (Progress.FAILED, Progress.FAILED)


def test_each_side_waits_for_the_other_for_its_lease_only() -> None:
    with two(lease_seconds=0.3) as both:
        sender = both.prefill.outgoing()
        sender.begin(ROOM, 1)
        ended(sender)
        assert isinstance(sender.error, LeaseExpired)
        assert "no decode server made an offer within 0.3 s" in str(sender.error)
        late = both.incoming()
        late.receive(Room(1, ROOM.prompt), [2], 0)
        ended(late)
        # The ticket is valid for the lease: either prefill reports it expired, or decode's lease
        # ends.
        assert isinstance(late.error, LeaseExpired | TicketExpired)


def test_a_lost_prefill_is_named_and_found_again_after_its_restart(both: Two) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    sender.begin(ROOM, 2)
    receiver.receive(ROOM, [2, 3], 0)
    until(lambda: sender.progress is Progress.WAITING)
    both.prefill.agent.close()
    ended(receiver)
    assert isinstance(receiver.error, PeerLost | TransferCancelled)
    gone = both.incoming()
    gone.receive(Room(2, ROOM.prompt), [2, 3], 0)
    ended(gone)
    assert isinstance(gone.error, ConnectFailed)
    with instance("prefill", epoch=2) as anew:
        both.server.take(_signed(both, anew))
        for plane in anew.pool:
            plane[5] = 7
        sender, receiver = anew.outgoing(), both.incoming()
        sender.begin(Room(3, ROOM.prompt), 1)
        receiver.receive(Room(3, ROOM.prompt), [2], 0)
        until(lambda: sender.progress is Progress.WAITING)
        sender.send([5], 0)
        ended(sender, receiver)
        assert receiver.progress is Progress.SUCCESS, receiver.error
        assert all((plane[2] == 7).all() for plane in both.decode.pool)


def test_a_prefill_of_another_model_is_refused_before_a_byte_moves(both: Two) -> None:
    both.server.take(_signed(both, both.prefill, model="another"))
    receiver = both.incoming()
    receiver.receive(ROOM, [2], 0)
    ended(receiver)
    assert isinstance(receiver.error, InvalidArgument)
    assert "--served-model-name: 'another' on prefill" in str(receiver.error)


def test_more_pages_than_the_prompt_has_fail_on_both_sides(both: Two) -> None:
    sender, receiver = both.prefill.outgoing(), both.incoming()
    sender.begin(ROOM, 1)
    receiver.receive(ROOM, [2], 0)
    until(lambda: sender.progress is Progress.WAITING)
    sender.send([5, 6], 0)
    ended(sender, receiver)
    assert "page 2 of a prompt of 1 pages" in str(receiver.error)


def test_many_requests_at_once_stay_apart(both: Two) -> None:
    rooms = [Room(number, prompt_digest([number])) for number in range(PAGES)]
    receivers = [both.incoming() for _ in rooms]
    senders = [both.prefill.outgoing() for _ in rooms]
    order = np.random.default_rng(2).permutation(PAGES)
    for room, receiver in zip(rooms, receivers, strict=True):
        receiver.receive(room, [room.number], 0)
    for sender, room in zip(senders, rooms, strict=True):
        sender.begin(room, 1)
    for index in order:
        sender = senders[index]
        until(lambda: sender.progress is not Progress.BOOTSTRAPPING)  # noqa: B023
        assert sender.progress is Progress.WAITING, (sender.error, receivers[index].error)
        sender.send([PAGES - 1 - index], 0)
    ended(*senders, *receivers)
    for ours, theirs in zip(both.prefill.pool, both.decode.pool, strict=True):
        assert (ours[::-1] == theirs).all()


def _signed(both: Two, about: Instance, **other: str) -> str:
    return sign_introduction(about.introduction(**other), both.decode.agent.settings.keys)


class SglangApi(BaseHTTPRequestHandler):
    """SGLang's HTTP API, as far as a connector uses it."""

    answers: dict[str, Any]

    def do_GET(self) -> None:
        body = self.answers.get(self.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[tuple[str, dict[str, Any]]]:
    answers: dict[str, Any] = {"/v1/models": {"data": [{"id": "tiny"}, {"id": "sql"}]}}
    handler = type("Handler", (SglangApi,), {"answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answers
        server.shutdown()


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_fleet_has_the_load_that_sglang_reports(
    role: Role, api: tuple[str, dict[str, Any]]
) -> None:
    url, answers = api

    def spec(engine: Engine, cache: KvCache) -> InstanceSpec:
        return InstanceSpec(
            instance_id="s",
            role=role,
            model="tiny",
            engine_address=engine.address,
            http_address=url,
            layout=cache.layout,
            num_blocks=cache.num_blocks,
            bootstrap_address="10.0.0.5:8998",
        )

    with RunningControlPlane(lease_seconds=3) as fleet:

        def there() -> dict[str, Any]:
            [one] = httpx2.get(fleet.url + "/v1/instances").json()["instances"] or [{}]
            return dict(one)

        with instance("s", control_plane=fleet.url, make_spec=spec):
            until(lambda: there().get("state") == "joining")
            answers["/health"] = "up"
            until(lambda: there()["state"] == "ready")
            assert there()["bootstrap_address"] == "10.0.0.5:8998"
            assert there()["load"]["free_blocks"] is None, "nothing was told yet"
            load = {"num_running_reqs": 3, "num_waiting_reqs": 2, "num_used_tokens": 33}
            load |= {"max_total_num_tokens": 160, "gen_throughput": 40.5}
            answers["/v1/loads?include=core"] = {"loads": [load]}
            until(lambda: there()["load"]["running"] == 3)
            told = there()["load"]
            assert (told["waiting"], told["free_blocks"], told["queues"]) == (2, 7, True)
            until(lambda: there()["load"]["models"] == ["sql"])
            assert there()["load"]["tokens_per_second"] == (40.5 if role is Role.DECODE else 0)
            load["total_prefill_uncached_tokens"] = 900
            if role is Role.PREFILL:
                until(lambda: there()["load"]["tokens_per_second"] > 0)
        assert there() == {}


def test_a_rank_opens_the_nics_of_its_gpu(tmp_path: Path, engines: list[dict[str, Any]]) -> None:
    with instance("decode", gpu="0000:59:00.0", root=machines.write("p5en", tmp_path)):
        assert [engine["nics"] for engine in engines] == [["rdmap85s0", "rdmap86s0"]]
