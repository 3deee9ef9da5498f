"""One address in front of several replicas, like a Service in a cluster."""

from __future__ import annotations

import contextlib
import itertools
import socket
import socketserver
import threading
from collections.abc import Iterable
from typing import Any, Final, Self

_CHUNK: Final = 1 << 16


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class Balancer:
    """A forwarder that passes each TCP connection to the next replica that accepts it. Any
    thread."""

    def __init__(self, ports: Iterable[int] = (), *, port: int = 0) -> None:
        self.ports = list(ports)
        """The ports of the replicas, which may change."""
        self._turn = itertools.count()
        self._listener = _Listener(("127.0.0.1", port), self._forward)  # type: ignore[arg-type]
        self.url = f"http://127.0.0.1:{self._listener.server_address[1]}"
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def _forward(self, client: socket.socket, *_: Any) -> None:
        ports, turn = list(self.ports), next(self._turn)
        for step in range(len(ports)):
            port = ports[(turn + step) % len(ports)]
            try:
                replica = socket.create_connection(("127.0.0.1", port))
            except ConnectionError:
                continue
            with replica:
                back = threading.Thread(target=_copy, args=(replica, client), daemon=True)
                back.start()
                _copy(client, replica)
                back.join()
            return

    def close(self) -> None:
        self._listener.shutdown()
        self._listener.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
