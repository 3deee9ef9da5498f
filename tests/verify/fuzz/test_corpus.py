"""Every input of the Python targets: seeds, and what fuzzing found, including past defects.

The engine's own tests replay the inputs of the C++ targets.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from verify.fuzz import inputs, native, seeds
from verify.fuzz.python import TARGETS, load
from verify.fuzz.replay import replay

pytestmark = pytest.mark.native


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_keeps_the_promises_of_the_code(tmp_path: Path, name: str) -> None:
    replay(name, seeds.folders(name, tmp_path))


def test_every_target_has_seeds_and_every_corpus_a_target() -> None:
    assert {*seeds.TARGETS} == {*TARGETS, *native.DECODERS}
    assert {packed.stem for packed in inputs.CORPUS.iterdir()} <= {*seeds.TARGETS}


def test_the_sources_that_targets_are_to_cover_exist_and_are_no_links() -> None:
    named = [native.SOURCES / name for sources in native.DECODERS.values() for name in sources]
    named += [native.ROOT / name for target in TARGETS for name in load(target).DECODERS]
    root = native.ROOT.resolve()  # coverage names real paths
    assert [
        source
        for source in named
        if not source.exists() or source.resolve() != root / source.relative_to(native.ROOT)
    ] == []


@pytest.mark.parametrize("name", seeds.TARGETS)
def test_the_seeds_are_the_same_each_time(name: str) -> None:
    first = list(seeds.of(name))
    assert first
    assert list(seeds.of(name)) == first
