from __future__ import annotations

import re
from typing import Any

import pytest

from kvxfer.connectors.vllm.settings import ConnectorSettings
from kvxfer.engine.operator_options import JSON_OPTIONS
from kvxfer.errors import InvalidArgument
from kvxfer.instances import Role

HTTP = "http://10.0.0.7:8000"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", "0123456789abcdef")
    for name in ("KVXFER_HTTP_ADDRESS", "KVXFER_HTTP_PORT", "KVXFER_HOST"):
        monkeypatch.delenv(name, raising=False)


def read(extra: dict[str, Any], role: str = "kv_producer") -> ConnectorSettings:
    return ConnectorSettings.read(extra, role=role, engine_id="engine", model="m")


def test_settings_have_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_HTTP_ADDRESS", HTTP + "/")
    settings = read({})
    assert (settings.role, settings.instance_id) == (Role.PREFILL, "engine")
    assert (settings.http_address, settings.host) == (HTTP, "127.0.0.1")
    assert (settings.lease_seconds, settings.peer_timeout) == (30.0, 0.7)
    assert not settings.checksums
    assert read({"checksums": True}).checksums


@pytest.mark.parametrize(
    ("host", "address"), [("10.0.0.7", "http://10.0.0.7:81"), ("fd00::7", "http://[fd00::7]:81")]
)
def test_a_port_alone_is_on_the_host(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str
) -> None:
    """Kubernetes gives a pod its address without brackets."""
    assert read({"host": host, "http_port": 81}).http_address == address
    listens = {"host": "::", "advertise": host}
    assert read({**listens, "http_port": 81}).http_address == address
    monkeypatch.setenv("KVXFER_HOST", host)
    monkeypatch.setenv("KVXFER_HTTP_PORT", "81")
    assert read({}).http_address == address
    assert read({"http_address": HTTP}).http_address == HTTP, "a setting is before variables"


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_HTTP_ADDRESS", "http://fd00::1:8100")
    with pytest.raises(InvalidArgument, match="KVXFER_HTTP_ADDRESS is 'http://fd00::1:8100'"):
        read({})


def test_every_option_of_the_engine_can_be_set() -> None:
    values: dict[str, Any] = {
        "fabrics": ["verbs", "tcp"],
        "nics": ["mlx5_0"],
        "exclude_nics": ["mlx5_bond*"],
        "cpus": [2, 3],
        "traffic_class": 106,
        "peer_timeout": 5,
        "tuning": {"service_level": 3, "lanes": 4, "memory_windows": False},
    }
    settings = read({"http_address": HTTP, "host": "10.0.0.7", **values})
    assert settings.options == {"host": "10.0.0.7", **values}
    assert (settings.host, settings.peer_timeout) == ("10.0.0.7", 5.0)
    others = dict.fromkeys(JSON_OPTIONS)  # null is the same as leaving it out
    assert read({"http_address": HTTP, **others}).options == {"host": "127.0.0.1"}


def test_each_role_of_vllm_maps_to_a_role() -> None:
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
        ({"http_address": "http://fd00::1:81"}, "extra_config.http_address is 'http://fd00::1:81'"),
        ({"http_address": "http://0.0.0.0:81"}, "not an address at which others reach it"),
        ({"http_address": HTTP, "http_port": 81}, "http_port is 81; set one of them"),
        ({"host": "::", "http_port": 81}, "'http://[::]:81', which is where a server listens"),
        ({"http_port": 0}, "extra_config.http_port is 0; pass a port, 1 to 65535"),
        ({"http_address": HTTP, "leaseseconds": 5}, "leaseseconds is no setting"),
        ({"http_address": HTTP, "lease_seconds": 0}, "lease_seconds is 0"),
        ({"http_address": HTTP, "lease_seconds": True}, "lease_seconds is True; pass a number"),
        ({"http_address": HTTP, "lease_seconds": 3600}, "lease_seconds is 3600.0; use less than"),
        ({"http_address": HTTP, "checkpoint": ""}, "checkpoint has a length of 0; use 1 or more"),
        ({"http_address": HTTP, "checkpoint": 7}, "checkpoint is 7; pass text"),
        ({"http_address": HTTP, "peer_timeout": True}, "peer_timeout is True"),
        ({"http_address": HTTP, "nics": "mlx5_0"}, "nics is 'mlx5_0'; pass a list, each item text"),
        (
            {"http_address": HTTP, "tuning": {"lanes": -1}},
            "extra_config.tuning.lanes is refused: tuning.lanes is -1; pass",
        ),
        (
            {"http_address": HTTP, "lanes": 4},
            "extra_config.lanes is no setting of kvxfer; set kv_connector_extra_config.tuning.lan",
        ),
        ({"http_address": HTTP, "fabrics": ["rdma"]}, "fabrics is ['rdma']; choose from local"),
        ({"http_address": HTTP, "port": 5}, "port is no setting"),  # each rank has another port
        ({"http_address": HTTP, "checksums": "yes"}, "checksums is 'yes'; pass true or false"),
        ({"http_address": HTTP, "cluster_key_file": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_invalid_settings_are_refused(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(named)):
        read(extra)
