"""Fixtures of the connectors' tests."""

from __future__ import annotations

from tests.kv.conftest import causes_are_waited_for

__all__ = ["causes_are_waited_for"]
