"""Fixtures of the connectors' tests."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.connectors import transfer_engine
from kvxfer.engine import Engine
from kvxfer.engine.native import native
from tests.kv.conftest import causes_are_waited_for

__all__ = ["causes_are_waited_for", "engines"]


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each engine that a connector makes from now on. The engines are real, but
    without their NICs, which this host may lack."""
    made: list[dict[str, Any]] = []

    class Recorded(Engine):
        def __init__(self, **options: Any) -> None:
            made.append(dict(options))
            super().__init__(**{**options, "nics": []})

    monkeypatch.setattr(transfer_engine, "Engine", Recorded)
    monkeypatch.setattr(native, "BUILT_FABRICS", ("local", "tcp", "verbs", "ofi"))
    return made
