"""docs/errors.md: operators find every error code, its meaning and its remedy."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from kvxfer.cli.generated_docs import errors
from kvxfer.errors import KvxferError, every

PAGE = Path(__file__).parents[2] / "docs/errors.md"
KINDS = [pytest.param(kind, id=kind.code) for kind in every() if kind is not KvxferError]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == errors(), "python -m kvxfer.cli.generated_docs docs"


def test_each_code_has_one_row() -> None:
    rows = re.findall(r"^\| `([a-z-]+)`", errors(), re.MULTILINE)
    assert sorted(rows) == sorted(kind.code for kind in every() if kind is not KvxferError)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_states_its_own_code_meaning_and_remedy(kind: type[KvxferError]) -> None:
    meaning, _, _ = (inspect.getdoc(kind) or "").partition("\n\n")
    assert "code" in vars(kind)
    assert "__doc__" in vars(kind)
    assert meaning.endswith(".")
    if not kind.__subclasses__():
        assert kind.remedy.endswith(".")
        assert "remedy" in vars(kind)
    assert "|" not in meaning + kind.remedy
