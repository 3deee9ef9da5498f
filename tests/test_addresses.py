"""Hosts and ports as text."""

from __future__ import annotations

import httpx2
import pytest

from kvxfer.addresses import (
    BOOTSTRAP_FORM,
    ENGINE_FORM,
    HTTP_FORM,
    host_and_port,
    require_address,
)
from kvxfer.errors import InvalidArgument


@pytest.mark.parametrize(
    ("host", "said"), [("10.0.0.5", "10.0.0.5:80"), ("fd00::1", "[fd00::1]:80"), ("a.b", "a.b:80")]
)
def test_an_ipv6_address_is_in_brackets_beside_its_port(host: str, said: str) -> None:
    assert host_and_port(host, 80) == said
    assert httpx2.URL(f"http://{said}/").host == host
    require_address("http_address", f"http://{said}", HTTP_FORM)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("http://10.0.0.5:8000", HTTP_FORM),
        ("https://worker-0.decode.llm.svc.cluster.local.:8443", HTTP_FORM),
        ("http://worker_1", HTTP_FORM),
        ("http://[::1]:8000", HTTP_FORM),  # text
        ("kvx://[fd00::1]:7400/9f1c2a7be0d44c5e8a3b6d7f01e2c3d4", ENGINE_FORM),
        ("[fd00::1]:8998", BOOTSTRAP_FORM),
    ],
)
def test_addresses_that_others_reach(text: str, form: str) -> None:
    require_address("address", text, form)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("http://fd00::1:8100", "an IPv6 address stands in brackets"),
        ("http://fd00::1", "an IPv6 address stands in brackets"),
        ("http://[fd00::1:8100", "Invalid IPv6 URL"),
        ("http://[fd00::g]:8100", "fd00::g"),
        ("http://[fe80::1%eth0]:8100", "not an IP address that other hosts can reach"),
        ("http://10.0.0.300:8100", "10.0.0.300 is not an IP address"),
        ("http://:8100", "it names no host"),
        ("http://", "it names no host"),
        ("http://wörker:80", "wörker is not a host name"),
        ("http://worker:0", "it has no port"),
        ("http://worker:", "it has no port"),
        ("http://worker:65536", "Port out of range 0-65535"),
        ("http://worker:http", "Port could not be cast to integer value as 'http'"),
        ("http://worker:80/", "nothing comes after the port"),
        ("http://worker:80/v1", "nothing comes after the port"),
        ("http://worker:80?key=1", "nothing comes after the port"),
        ("worker:80", "it does not begin with http://"),
        ("http://[::]:8100", "where a server listens"),
        ("http://0.0.0.0:8100", "where a server listens"),
    ],
)
def test_an_invalid_address_is_refused_with_its_fault_and_the_form(text: str, fault: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        require_address("http_address", text, HTTP_FORM)
    said = str(refused.value)
    assert said.startswith(f"http_address is {text!r}, ") and fault in said
    assert said.endswith(("write it as http://HOST:PORT", "has it from its option `host`)"))


def test_a_password_in_an_address_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidArgument, match="no user and no password") as refused:
        require_address("http_address", "http://me:secret@worker:80", HTTP_FORM)
    assert "secret" not in str(refused.value)
