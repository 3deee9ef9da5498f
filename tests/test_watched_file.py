"""Files that change while a process runs, in each way that this happens."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.watched_file import WatchedFile
from tests.virtual_time import VirtualClock


def parse(content: bytes) -> str:
    if content == b"bad":
        raise InvalidArgument("this is bad")
    return content.decode()


def write_in_place(file: Path, content: str) -> None:
    file.write_text(content)


def replace(file: Path, content: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(content)
    new.replace(file)


def swap_link(file: Path, content: str) -> None:
    """Writes as the kubelet does: the file is a link through `..data`, which is swapped whole."""
    folder = file.parent / f"..{content}"
    folder.mkdir()
    (folder / file.name).write_text(content)
    data = file.parent / "..data"
    link = file.parent / "..data_tmp"
    link.symlink_to(folder)
    link.replace(data)
    if not file.is_symlink():
        file.unlink(missing_ok=True)
        file.symlink_to(Path("..data") / file.name)


@pytest.mark.parametrize("change", [write_in_place, replace, swap_link])
def test_new_content_is_seen_after_the_check_interval(tmp_path, change):
    file, clock = tmp_path / "secret", VirtualClock()
    change(file, "first")
    watched = WatchedFile("secret", file, parse, clock=clock)
    change(file, "second!")
    assert watched.current == "first"
    clock.advance(1)
    assert watched.current == "second!"


def test_file_is_parsed_again_only_if_it_changed(tmp_path):
    file, clock, parsed = tmp_path / "secret", VirtualClock(), []
    file.write_text("a")
    watched = WatchedFile("secret", file, parsed.append, clock=clock)
    for _ in range(4):
        clock.advance(1)
        _ = watched.current
    assert parsed == [b"a"]


@pytest.mark.parametrize("harm", ["bad", None], ids=["malformed", "removed"])
def test_previous_value_stays_in_force_and_the_log_says_so_once(tmp_path, caplog, harm):
    file, clock = tmp_path / "secret", VirtualClock()
    file.write_text("good")
    watched = WatchedFile("secret", file, parse, clock=clock)
    if harm is None:
        file.unlink()
    else:
        file.write_text(harm)
    with caplog.at_level(logging.ERROR, logger="kvxfer.watched_file"):
        for _ in range(4):
            clock.advance(1)
            assert watched.current == "good"
    assert len(caplog.records) == 1
    assert "stays in force" in caplog.text
    replace(file, "better")
    os.utime(file, ns=(1, 1))
    clock.advance(5)
    assert watched.current == "better"


def test_first_read_that_fails_is_an_error(tmp_path):
    with pytest.raises(InvalidArgument, match=r"the secret .*/none cannot be read: No such file"):
        WatchedFile("secret", tmp_path / "none", parse)
    (tmp_path / "bad").write_text("bad")
    with pytest.raises(InvalidArgument, match="this is bad"):
        WatchedFile("secret", tmp_path / "bad", parse)
