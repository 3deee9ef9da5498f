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
    assert (settings.host, settings.fabrics, settings.cpus) == ("127.0.0.1", None, ())
    assert (settings.lease_seconds, settings.peer_timeout) == (30.0, 0.7)
    assert "0123456789abcdef" not in repr(settings)


def test_what_is_set_is_used(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("another key of 16 bytes\n")
    (tmp_path / "tickets").write_text("a-ticket-key-of-more-than-16-bytes\n")
    settings = BackendSettings.read(
        {
            "KVXFER_HOST": "10.0.0.7",
            "KVXFER_CLUSTER_KEY_FILE": str(tmp_path / "key"),
            "KVXFER_TICKET_KEYS_FILE": str(tmp_path / "tickets"),
            "KVXFER_FABRICS": "verbs,tcp",
            "KVXFER_CPUS": "2,3",
            "KVXFER_LEASE_SECONDS": "5",
            "KVXFER_PEER_TIMEOUT": "1.5",
            "KVXFER_CHECKSUMS": "1",
        }
    )
    assert (settings.host, settings.fabrics, settings.cpus) == (
        "10.0.0.7",
        ("verbs", "tcp"),
        (2, 3),
    )
    assert (settings.lease_seconds, settings.peer_timeout) == (5.0, 1.5)
    assert settings.checksums
    assert settings.cluster_key == b"another key of 16 bytes"
    assert settings.keys is not BackendSettings.read({}).keys


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVXFER_LEASE_SECONDS", "soon"),
        ("KVXFER_LEASE_SECONDS", "0"),
        ("KVXFER_PEER_TIMEOUT", "99999"),
        ("KVXFER_CPUS", "a,b"),
        ("KVXFER_CHECKSUMS", "yes"),
    ],
)
def test_a_value_that_cannot_be_meant_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is '{value}'"):
        BackendSettings.read({name: value})
