"""Every input of the Python targets that a fuzzer found worth keeping, past findings among them.

Those of the C++ targets are replayed by the engine's own tests.
"""

from __future__ import annotations

import pytest

from verify.fuzz import seeds
from verify.fuzz.python import TARGETS, load

pytestmark = pytest.mark.native


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_keeps_the_promises_of_the_code(name: str) -> None:
    run = load(name).run
    run(b"")
    inputs = sorted((seeds.CORPUS / name).iterdir())
    assert inputs
    for path in inputs:
        try:
            run(path.read_bytes())
        except Exception as error:
            error.add_note(f"input: {path}")
            raise


def test_every_corpus_has_a_target() -> None:
    assert {folder.name for folder in seeds.CORPUS.iterdir()} == {*TARGETS, *seeds.NATIVE}
