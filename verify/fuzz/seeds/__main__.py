"""Writes the seeds into the corpora, for all targets or those that are named."""

from __future__ import annotations

import sys

from verify.fuzz.seeds import CORPUS, NATIVE, PYTHON

for target in sys.argv[1:] or {**NATIVE, **PYTHON}:
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate({**NATIVE, **PYTHON}[target]()):
        (folder / f"seed-{number:02}").write_bytes(content)
