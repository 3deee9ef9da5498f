from pathlib import Path

import pytest

from kvxfer.cluster_key import as_cluster_key, read_cluster_key
from kvxfer.errors import InvalidArgument


def test_text_and_bytes_give_the_same_key():
    assert as_cluster_key("sixteen bytes ok") == as_cluster_key(b"sixteen bytes ok")


def test_key_shorter_than_16_bytes_is_refused_with_its_length():
    with pytest.raises(InvalidArgument, match="has 15 bytes; use at least 16"):
        as_cluster_key("x" * 15)


def test_length_counts_bytes_not_characters():
    assert len(as_cluster_key("é" * 8)) == 16


def test_key_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", "k" * 20)
    assert read_cluster_key() == b"k" * 20


def test_file_wins_over_the_environment_and_loses_its_line_end(monkeypatch, tmp_path):
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", "k" * 20)
    file = tmp_path / "key"
    file.write_text("f" * 32 + "\n")
    assert read_cluster_key(file) == b"f" * 32


def test_no_key_anywhere_says_how_to_give_one(monkeypatch):
    monkeypatch.delenv("KVXFER_CLUSTER_KEY", raising=False)
    with pytest.raises(InvalidArgument, match="set KVXFER_CLUSTER_KEY"):
        read_cluster_key()


def test_missing_file_is_named():
    with pytest.raises(InvalidArgument, match=r"/nowhere/key cannot be read: No such file"):
        read_cluster_key(Path("/nowhere/key"))
