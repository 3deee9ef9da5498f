"""The inputs that fuzzing found."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
"""The folder of inputs that fuzzing found, under version control: a JSON file per target, with
inputs in base64 by name."""


def found(target: str) -> dict[str, bytes]:
    """Returns the inputs that fuzzing found for a target, by name."""
    packed = CORPUS / f"{target}.json"
    if not packed.exists():
        return {}
    return {name: base64.b64decode(text) for name, text in json.loads(packed.read_text()).items()}


def keep(crash: Path, target: str) -> str:
    """Adds an input that shows a defect to the corpus that the tests replay. Returns its name."""
    content = crash.read_bytes()
    name = f"found-{hashlib.sha256(content).hexdigest()[:12]}"
    inputs = {**found(target), name: content}
    texts = {name: base64.b64encode(inputs[name]).decode() for name in sorted(inputs)}
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{target}.json").write_text(json.dumps(texts, indent=0) + "\n")
    return name
