from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from kvxfer.demo import prompts
from kvxfer.demo.prompts import project_readme, read_prompt_file, split_text
from kvxfer.errors import InvalidArgument

PARAGRAPHS = "\n\n".join(f"Paragraph {i} " + "word " * 30 for i in range(40))


def without_space(text: str) -> str:
    return re.sub(r"\s", "", text)


@pytest.mark.parametrize("count", [1, 2, 7, 20, 40])
def test_pieces_are_all_of_the_text_and_about_equal(count: int) -> None:
    pieces = split_text(PARAGRAPHS, count)
    assert len(pieces) == count
    assert without_space("".join(pieces)) == without_space(PARAGRAPHS)
    size = len(PARAGRAPHS) / count
    assert all(0.5 * size - 3 <= len(piece) <= 1.5 * size for piece in pieces)


def test_pieces_begin_at_paragraphs_if_there_are_enough() -> None:
    assert all(piece.startswith("Paragraph") for piece in split_text(PARAGRAPHS, 8))


def test_a_text_with_fewer_paragraphs_is_cut_between_words() -> None:
    text = "one two three four five six seven eight nine ten"
    pieces = split_text(text, 4)
    assert " ".join(pieces) == text
    assert len(pieces) == 4


def test_a_text_without_spaces_is_cut_into_equal_pieces() -> None:
    assert split_text("abcdefgh", 4) == ["ab", "cd", "ef", "gh"]


def test_any_text_is_split_whole_or_refused(rng: random.Random) -> None:
    for _ in range(500):
        text = "".join(rng.choice("ab \n") for _ in range(rng.randrange(60)))
        count = rng.randrange(1, 12)
        try:
            pieces = split_text(text, count)
        except InvalidArgument:
            continue
        assert len(pieces) == count
        assert all(pieces)
        assert without_space("".join(pieces)) == without_space(text)


def test_a_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="3 characters cannot be split into 4 prompts"):
        split_text("abc", 4)
    with pytest.raises(InvalidArgument, match="0 characters cannot be split into 1 prompts"):
        split_text(" \n", 1)


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"nowhere cannot be read: No such file"):
        read_prompt_file(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match=r"binary is no UTF-8 text"):
        read_prompt_file(tmp_path / "binary")


def test_the_readme_of_the_checkout_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "README.md").write_text("About kvxfer")
    assert project_readme() == "About kvxfer"


def test_an_installation_gives_its_packaged_readme_or_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A README.md in site-packages belongs to another project.
    monkeypatch.setattr(prompts, "_CHECKOUT", tmp_path)
    (tmp_path / "README.md").write_text("not ours")
    info = tmp_path / "kvxfer-0.0.1.dist-info"
    info.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    head = "Metadata-Version: 2.1\nName: kvxfer\nVersion: 0.0.1\n"
    (info / "METADATA").write_text(f"{head}\nThe packaged README\n")
    assert project_readme().strip() == "The packaged README"
    (info / "METADATA").write_text(head)
    with pytest.raises(InvalidArgument, match="pass --prompt-file"):
        project_readme()
