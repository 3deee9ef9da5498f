from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.reference.tokens import ByteTokenizer, FileTokenizer, load_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder whose tokenizer knows three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "paged": 1, "cache": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_bytes_are_tokens_and_come_back() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("Aé") == [0x41, 0xC3, 0xA9]
    assert tokenizer.decode([0x41, 0xC3, 0xA9]) == "Aé"


def test_invalid_utf8_decodes_to_replacement_characters() -> None:
    assert ByteTokenizer().decode([0x41, 0xC3, 300, 0x42]) == "A��B"


def test_a_folder_without_tokenizer_gets_bytes(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert isinstance(load_tokenizer(None), ByteTokenizer)


def test_a_folders_own_tokenizer_is_used(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, FileTokenizer)
    assert tokenizer.encode("paged cache moved") == [1, 2, 0]
    assert tokenizer.decode([1, 2]) == "paged cache"


def test_a_missing_tokenizers_package_is_named_with_the_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(NotBuilt, match="pip install tokenizers"):
        load_tokenizer(folder)


def test_a_damaged_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(folder)
