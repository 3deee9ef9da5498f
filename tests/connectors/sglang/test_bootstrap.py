"""Servers that are accepted as prefill instances, and until when."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import httpx2
import pytest

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.connectors.sglang.bootstrap import BootstrapServer, Introductions, register
from kvxfer.connectors.sglang.introduction import Introduction, sign_introduction
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.errors import AddressInUse, ConnectFailed, Forbidden, TicketInvalid
from kvxfer.ticket import Ticket, TicketKeys, sign_ticket
from tests.virtual_time import VirtualClock

pytestmark = pytest.mark.native

SETTINGS = BackendSettings(cluster_key=b"the cluster key of these tests")
OTHERS = TicketKeys([b"the key of another cluster"])


def about(epoch: int = 1) -> Introduction:
    return Introduction("prefill", epoch, "127.0.0.1:5", "tiny", "bfloat16", 16, 100)


@pytest.fixture
def server() -> Iterator[BootstrapServer]:
    running = BootstrapServer("127.0.0.1", 0, SETTINGS)
    yield running
    running.close()


def url(server: BootstrapServer, path: str = "") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def ask(server: BootstrapServer) -> Introduction:
    introductions = Introductions(SETTINGS)
    return asyncio.run(introductions.ask(f"127.0.0.1:{server.port}"))


def test_decode_learns_what_prefill_has_registered(server: BootstrapServer) -> None:
    register(url(server), about(), SETTINGS)
    assert ask(server) == about()
    register(url(server), about(epoch=2), SETTINGS)
    assert ask(server) == about(epoch=2)


def test_decode_gets_an_error_before_prefill_has_registered(server: BootstrapServer) -> None:
    assert httpx2.get(url(server, "/health")).text == "ok"
    with pytest.raises(ConnectFailed, match=r"answers 503: the prefill instance still starts"):
        ask(server)


@pytest.mark.parametrize(
    "token",
    [
        sign_introduction(about(epoch=9), OTHERS),
        sign_introduction(about(epoch=0), SETTINGS.keys),
        sign_ticket(Ticket("t", "r", "p", 1, "d", 1, SYSTEM_CLOCK.unix() + 60), SETTINGS.keys),
        "nonsense",
        "",
    ],
    ids=["another cluster's", "an earlier epoch's", "a ticket", "nonsense", "nothing"],
)
def test_a_token_that_is_not_a_current_introduction_is_refused(
    server: BootstrapServer, token: str
) -> None:
    register(url(server), about(), SETTINGS)
    assert httpx2.put(url(server, "/route"), content=token).status_code == 403
    assert ask(server) == about()


def test_a_refused_prefill_gets_an_error(server: BootstrapServer) -> None:
    register(url(server), about(epoch=2), SETTINGS)
    with pytest.raises(Forbidden, match=r"epoch 1 of 'prefill' is over"):
        register(url(server), about(epoch=1), SETTINGS)


def test_a_body_that_is_too_large_is_refused(server: BootstrapServer) -> None:
    assert httpx2.put(url(server, "/route"), content="x" * 5000).status_code == 400
    assert httpx2.get(url(server, "/other")).status_code == 404


def test_decode_refuses_a_server_of_another_cluster() -> None:
    theirs = BackendSettings(cluster_key=b"the key of another cluster")
    server = BootstrapServer("127.0.0.1", 0, theirs)
    try:
        register(url(server), about(), theirs)
        with pytest.raises(TicketInvalid, match="same cluster key"):
            ask(server)
    finally:
        server.close()


def test_an_error_is_shared_by_all_who_asked_before_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    clock = VirtualClock()
    introductions = Introductions(SETTINGS, clock=clock)
    before = clock.monotonic()
    with pytest.raises(ConnectFailed, match="does not answer"):
        asyncio.run(introductions.ask(address))
    assert isinstance(introductions.problem(address, before), ConnectFailed)
    clock.advance(0.001)
    assert introductions.problem(address, clock.monotonic()) is None


def test_a_port_that_is_taken_is_named(server: BootstrapServer) -> None:
    with pytest.raises(AddressInUse, match=str(server.port)):
        BootstrapServer("127.0.0.1", server.port, SETTINGS)
