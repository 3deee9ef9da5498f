"""Hashes that name the prefixes of a prompt, so that cached KV blocks can be found by them."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

MAX_HASHES_PER_REQUEST: Final = 256
MAX_HASHES_PER_UPDATE: Final = 1024
MAX_HASHES_PER_INSTANCE: Final = 32 * 1024
"""A cache of two million tokens at 64 a hash."""
TOKENS_PER_HASH: Final = 64
"""The tokens per hash in kvxfer's own connectors and router, whatever the size of a KV block."""

KEPT_BITS: Final = 44
"""The last bits of a hash, all that the registry keeps. In a fleet of 10,000 caches of 450,000
tokens, one of 250,000 hashes that no cache has is then mistaken for a cached one."""

HASH_BYTES: Final = 6
LINK_BYTES: Final = 8


def chain_hashes(tokens: Sequence[int], tokens_per_hash: int, *, salt: str = "") -> tuple[int, ...]:
    """Returns one 64-bit hash per full block of tokens, over the hash before it and its tokens.

    A hash names the whole prefix up to its block, as vLLM's block hashes do. `salt` is what else
    the KV cache depends on: above all the model, then adapters. The control plane never computes a
    hash, so any other 64-bit chain hash works if all workers of a model and the routers share it.
    """
    parent = seed(salt)
    hashes = []
    for end in range(tokens_per_hash, len(tokens) + 1, tokens_per_hash):
        parent = following(parent, tokens[end - tokens_per_hash : end])
        hashes.append(hash_of(parent))
    return tuple(hashes)


def seed(salt: str) -> bytes:
    """Returns the link before the first block of a chain."""
    return hashlib.blake2b(salt.encode(), digest_size=LINK_BYTES).digest()


def following(link: bytes, block: Sequence[int]) -> bytes:
    """Returns the link of the next block."""
    content = link + struct.pack(f"<{len(block)}q", *block)
    return hashlib.blake2b(content, digest_size=LINK_BYTES).digest()


def hash_of(link: bytes) -> int:
    return int.from_bytes(link, "big")


def prompt_hashes(tokens: Sequence[int], model: str) -> tuple[int, ...]:
    """Returns the hashes of a computed prompt that a worker publishes, one per TOKENS_PER_HASH
    tokens.

    `model` is the name in the request: the model's, or the adapter's.
    """
    return chain_hashes(tokens, TOKENS_PER_HASH, salt=model)


class AskedHashes(NamedTuple):
    """The hashes of a prompt that a router sends."""

    hashes: tuple[int, ...] = ()
    tokens_per_hash: int | None = None


NO_HASHES: Final = AskedHashes()


def asked_hashes(tokens: Sequence[int], model: str) -> AskedHashes:
    """Returns the hashes of a prompt. Of a long one it takes every second, third, … hash, so that
    they reach the end."""
    hashes = prompt_hashes(tokens, model)
    step = max(-(-len(hashes) // MAX_HASHES_PER_REQUEST), 1)
    return AskedHashes(hashes[step - 1 :: step], step * TOKENS_PER_HASH)


def as_text(hashes: Iterable[int]) -> list[str]:
    """Returns the hashes as in the REST API: 16 hexadecimal digits, as JSON has no 64-bit
    numbers."""
    return [f"{number:016x}" for number in hashes]


def from_text(texts: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(text, 16) for text in texts)


def pack(hashes: Iterable[int]) -> bytes:
    """Returns the kept bits of the hashes, six bytes each."""
    kept = (1 << KEPT_BITS) - 1
    return b"".join((number & kept).to_bytes(HASH_BYTES, "big") for number in hashes)


def unpack(packed: bytes) -> tuple[int, ...]:
    ends = range(HASH_BYTES, len(packed) + 1, HASH_BYTES)
    return tuple(int.from_bytes(packed[end - HASH_BYTES : end], "big") for end in ends)
