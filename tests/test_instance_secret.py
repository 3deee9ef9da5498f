"""The file with the secret of an instance, for other processes of the worker's user."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from kvxfer.instance_secret import keep_secret, kept_secret


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Unsets the variables that name a folder; temporary files go to this folder."""
    monkeypatch.delenv("KVXFER_RUNTIME_DIR")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_file_is_in_the_named_folder_or_else_in_one_of_the_user(nowhere, monkeypatch):
    assert kept_secret("p") is None
    assert keep_secret("p", "s-1") == nowhere / f"kvxfer-{os.geteuid()}" / "p.secret"
    for name, folder in (("XDG_RUNTIME_DIR", "user/kvxfer"), ("KVXFER_RUNTIME_DIR", "named")):
        monkeypatch.setenv(name, str(nowhere / folder.partition("/")[0]))
        assert kept_secret("p") is None
        assert keep_secret("p", folder) == nowhere / folder / "p.secret"
        assert kept_secret("p") == folder


def test_only_the_user_can_read_the_file_whatever_existed_before(nowhere):
    folder = nowhere / f"kvxfer-{os.geteuid()}"
    folder.mkdir(mode=0o777)
    elsewhere = nowhere / "elsewhere"
    elsewhere.write_text("another's")
    (folder / "p.secret").symlink_to(elsewhere)
    file = keep_secret("p", "mine")
    assert not file.is_symlink()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert (kept_secret("p"), elsewhere.read_text()) == ("mine", "another's")
    assert [each.name for each in folder.iterdir()] == ["p.secret"]


def test_an_unreadable_file_is_no_secret(nowhere):
    file = keep_secret("p", "mine")
    file.write_bytes(b"\xff")
    assert kept_secret("p") is None
    file.write_text("")
    assert kept_secret("p") is None
