"""Text to token ids and back: bytes by default, a checkpoint's own tokenizer if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kvxfer.errors import InvalidArgument, NotBuilt


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """One token per UTF-8 byte, ids 0 to 255; other ids decode to U+FFFD."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        # 0xff never occurs in UTF-8, so it decodes to the replacement character.
        return bytes(t if t < 256 else 0xFF for t in tokens).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, read by Hugging Face's `tokenizers`."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise NotBuilt(
                f"{path} needs the tokenizers package; install it: pip install tokenizers"
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception
            raise InvalidArgument(f"{path} cannot be read: {error}") from error

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens))
        return text


def load_tokenizer(folder: Path | None) -> Tokenizer:
    """Returns the tokenizer of a checkpoint folder; bytes if there is no folder or it has none.

    Raises:
        NotBuilt: the folder has one, but the `tokenizers` package is not installed.
        InvalidArgument: the folder's tokenizer cannot be read.
    """
    if folder is not None and (folder / "tokenizer.json").is_file():
        return FileTokenizer(folder / "tokenizer.json")
    return ByteTokenizer()
