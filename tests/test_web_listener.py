from __future__ import annotations

import errno
import socket

import pytest

from kvxfer.errors import AddressInUse, InvalidArgument
from kvxfer.web.listener import bind, url_of

pytestmark = pytest.mark.native


def test_port_0_is_a_free_port_that_the_url_names():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener) == f"http://127.0.0.1:{port}"
        socket.create_connection(("127.0.0.1", port)).close()


def test_taken_port_is_named_with_a_remedy():
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(AddressInUse, match=rf"port {port} on 127\.0\.0\.1 is taken; stop"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid"])
def test_host_of_another_machine_is_refused(host):
    with pytest.raises(InvalidArgument, match="no address of this machine"):
        bind(host, 0)


def test_ipv6_address_is_bracketed():
    try:
        listener = bind("::1", 0)
    except InvalidArgument:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"


def test_two_colons_are_every_ipv4_and_ipv6_address():
    with bind("::", 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        if ":" in listener.getsockname()[0]:  # the machine has IPv6
            socket.create_connection(("::1", port)).close()


def test_two_colons_are_every_ipv4_address_on_a_host_without_ipv6(monkeypatch):
    really = socket.socket

    def without_ipv6(family, *rest):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return really(family, *rest)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    with bind("::", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with pytest.raises(InvalidArgument, match="'::1' is no address of this machine"):
        bind("::1", 0)
