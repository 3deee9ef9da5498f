"""A name for a prompt, by which both sides of a transfer check that they mean the same one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def prompt_digest(tokens: Sequence[int], *extras: str) -> bytes:
    """Returns 16 bytes that name a prompt. `extras` are what else its KV cache depends on: an
    adapter, the images in it."""
    digest = hashlib.blake2b(np.asarray(tokens, dtype="<i8").tobytes(), digest_size=16)
    for extra in extras:
        digest.update(b"\0" + extra.encode())
    return digest.digest()
