"""The requests that SGLang's decode servers, or any client of the port, send a bootstrap server."""

from __future__ import annotations

import functools
import socket

from kvxfer.connectors.sglang import bootstrap
from kvxfer.connectors.sglang.introduction import Introduction, sign_introduction
from kvxfer.connectors.sglang.settings import BackendSettings
from verify.fuzz.python.choices import Choices
from verify.fuzz.python.tickets import KEYS

DECODERS = {"kvxfer/connectors/sglang/bootstrap.py": ["BootstrapServer.take", "_handler_of"]}

KEY = b"0123456789abcdef0123456789abcdef"


@functools.cache
def _server() -> bootstrap.BootstrapServer:
    settings = BackendSettings(cluster_key=KEY, ticket_keys=None)
    return bootstrap.BootstrapServer("127.0.0.1", 0, settings)


def run(data: bytes) -> None:
    choices = Choices(data)
    server = _server()
    server._token, server._epoch = None, 1
    _request(server, choices.bytes() if choices.flag() else _put(choices))
    _request(server, b"GET /route HTTP/1.0\r\n\r\n")
    _request(server, choices.rest())


def _put(choices: Choices) -> bytes:
    about = Introduction("prefill-0", choices.byte(), "kvx://h", "m", "bfloat16", 16, 64)
    body = sign_introduction(about, KEYS).encode()
    length = choices.one_of((str(len(body)), choices.text(), "-1", "9" * 5000))
    head = f"PUT /route HTTP/1.0\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def _request(server: bootstrap.BootstrapServer, data: bytes) -> None:
    """Handles one connection whose bytes have all arrived. The handler must end without an
    error."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        server._server.RequestHandlerClass(theirs, ("127.0.0.1", 0), server._server)
