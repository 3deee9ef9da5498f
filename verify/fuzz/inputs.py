"""The inputs that a target is known by: its seeds, and what fuzzing found."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Final

from verify.fuzz import seeds

CORPUS: Final = Path(__file__).parent / "corpus"
"""What fuzzing found, under version control; a target without findings has no folder."""


def folders(target: str, seeded: Path) -> list[Path]:
    """Where the inputs of a target are, when its seeds have been written below `seeded`."""
    seeds.write(target, seeded / target)
    return [folder for folder in (seeded / target, CORPUS / target) if folder.is_dir()]


def keep(crash: Path, target: str) -> Path:
    """Puts an input that shows a defect into the corpus, which the tests replay from now on."""
    (CORPUS / target).mkdir(parents=True, exist_ok=True)
    found = CORPUS / target / f"found-{hashlib.sha256(crash.read_bytes()).hexdigest()[:12]}"
    return Path(shutil.copyfile(crash, found))
