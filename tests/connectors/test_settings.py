from __future__ import annotations

from typing import Any

import pytest

from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.errors import InvalidArgument
from kvxfer.instances import Role

HTTP = "http://10.0.0.7:8000"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", "0123456789abcdef")
    monkeypatch.delenv("KVXFER_HTTP_ADDRESS", raising=False)


def read(extra: dict[str, Any], role: str = "kv_producer") -> ConnectorSettings:
    return ConnectorSettings.read(extra, role=role, engine_id="engine", model="m")


def test_what_is_not_set_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_HTTP_ADDRESS", HTTP + "/")
    settings = read({})
    assert (settings.role, settings.instance_id) == (Role.PREFILL, "engine")
    assert (settings.http_address, settings.host) == (HTTP, "127.0.0.1")
    assert (settings.lease_seconds, settings.peer_timeout) == (30.0, 0.7)
    assert not settings.checksums
    assert read({"checksums": True}).checksums


def test_each_role_of_vllm_has_its_own() -> None:
    roles = ("kv_producer", "kv_consumer", "kv_both")
    assert [read({"http_address": HTTP}, role).role for role in roles] == [
        Role.PREFILL,
        Role.DECODE,
        Role.BOTH,
    ]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "http_address is missing"),
        ({"http_address": HTTP, "leaseseconds": 5}, "leaseseconds is no setting"),
        ({"http_address": HTTP, "lease_seconds": 0}, "lease_seconds is 0"),
        ({"http_address": HTTP, "peer_timeout": True}, "peer_timeout is True"),
        ({"http_address": HTTP, "checksums": "yes"}, "checksums is 'yes'; pass true or false"),
        ({"http_address": HTTP, "cluster_key_file": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_what_cannot_be_meant_is_refused(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read(extra)
