"""The KVXFER_* variables of the SGLang backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.errors import InvalidArgument


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", "0123456789abcdef")


def test_without_variables_there_are_defaults() -> None:
    settings = BackendSettings.read({})
    assert (settings.host, settings.options) == ("127.0.0.1", {})
    assert (settings.lease_seconds, settings.peer_timeout) == (30.0, 0.7)
    assert "0123456789abcdef" not in repr(settings)


def test_variables_that_are_set_are_used(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("another key of 16 bytes\n")
    (tmp_path / "tickets").write_text("a-ticket-key-of-more-than-16-bytes\n")
    settings = BackendSettings.read(
        {
            "KVXFER_HOST": "10.0.0.7",
            "KVXFER_CLUSTER_KEY_FILE": str(tmp_path / "key"),
            "KVXFER_TICKET_KEYS_FILE": str(tmp_path / "tickets"),
            "KVXFER_FABRICS": "verbs,tcp",
            "KVXFER_EXCLUDE_NICS": "mlx5_8, mlx5_bond*",
            "KVXFER_CPUS": "2,3",
            "KVXFER_TRAFFIC_CLASS": "106",
            "KVXFER_LANES": "",
            "KVXFER_TUNING_LANES": "4",
            "KVXFER_TUNING_SPIN": "",
            "KVXFER_LEASE_SECONDS": "5",
            "KVXFER_PEER_TIMEOUT": "1.5",
            "KVXFER_CHECKSUMS": "1",
        }
    )
    assert settings.options == {
        "host": "10.0.0.7",
        "fabrics": ["verbs", "tcp"],
        "exclude_nics": ["mlx5_8", "mlx5_bond*"],
        "cpus": [2, 3],
        "traffic_class": 106,
        "peer_timeout": 1.5,
        "tuning": {"lanes": 4},
    }
    assert (settings.lease_seconds, settings.peer_timeout) == (5.0, 1.5)
    assert settings.checksums
    assert settings.cluster_key == b"another key of 16 bytes"
    assert settings.keys is not BackendSettings.read({}).keys


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVXFER_LEASE_SECONDS", "soon"),
        ("KVXFER_LEASE_SECONDS", "0"),
        ("KVXFER_PEER_TIMEOUT", "soon"),
        ("KVXFER_TUNING_SERVICE_LEVEL", "high"),
        ("KVXFER_TUNING_LANES", "-1"),
        ("KVXFER_CPUS", "a,b"),
        ("KVXFER_CHECKSUMS", "yes"),
    ],
)
def test_the_error_names_a_variable_with_an_invalid_value(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} is .*{value}"):
        BackendSettings.read({name: value})


def test_a_variable_of_tuning_without_the_word_is_refused_with_its_name() -> None:
    with pytest.raises(InvalidArgument, match=r"^KVXFER_LANES is .*; set KVXFER_TUNING_LANES$"):
        BackendSettings.read({"KVXFER_LANES": "4"})


def test_the_port_of_a_kubernetes_service_is_not_taken_for_the_engines() -> None:
    assert BackendSettings.read({"KVXFER_PORT": "tcp://10.96.0.9:8000"}).options == {}
