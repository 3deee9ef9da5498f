"""The prompts of the demo: pieces of a text, cut where a reader would cut it."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from kvxfer.errors import InvalidArgument

_CHECKOUT = Path(__file__).resolve().parents[2]
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_WORD_END = re.compile(r"\s+")


def project_readme() -> str:
    """Returns the project's README, from the checkout or from the package.

    Raises InvalidArgument if there is neither.
    """
    if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "README.md").is_file():
        return read_prompt_file(_CHECKOUT / "README.md")
    try:
        description = importlib.metadata.metadata("kvxfer").json.get("description")
    except importlib.metadata.PackageNotFoundError:
        description = None
    if not isinstance(description, str) or not description.strip():
        raise InvalidArgument(
            "this installation has no README to take prompts from; pass --prompt-file"
        )
    return description


def read_prompt_file(path: Path) -> str:
    """Returns the text of a file. Raises InvalidArgument if it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is no UTF-8 text: {error.reason}") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error


def split_text(text: str, count: int) -> list[str]:
    """Splits all of `text` into `count` pieces of about equal length.

    Cuts lie at the end of a paragraph if one is near, otherwise between words, otherwise anywhere,
    at most a quarter of a piece from the cuts of equal pieces. White space around pieces is
    dropped.

    Raises:
        InvalidArgument: there are not `count` pieces with something in them.
    """
    text = text.strip()
    paragraphs = [match.end() for match in _PARAGRAPH_END.finditer(text)]
    words = [match.end() for match in _WORD_END.finditer(text)]
    size = len(text) / count
    cuts = [0]
    for index in range(1, count):
        even = round(index * size)
        near = [cut for cut in (_nearest(paragraphs, even), _nearest(words, even)) if cut]
        cuts.append(next((cut for cut in near if abs(cut - even) <= size / 4), even))
    cuts.append(len(text))
    pieces = [text[start:stop].strip() for start, stop in itertools.pairwise(cuts)]
    if not all(pieces):
        raise InvalidArgument(
            f"a text of {len(text)} characters cannot be split into {count} prompts; ask for fewer "
            "--prompts or give a longer text"
        )
    return pieces


def _nearest(cuts: Sequence[int], even: int) -> int | None:
    return min(cuts, key=lambda cut: abs(cut - even), default=None)
