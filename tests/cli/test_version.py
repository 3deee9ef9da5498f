"""`kvxfer --version`."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvxfer

pytestmark = pytest.mark.native


def test_the_version_is_shown():
    shown = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout == f"kvxfer {kvxfer.__version__}\n"
