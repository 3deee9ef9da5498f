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
"""Of the hashes that kvxfer's own connectors and router make, whatever the size of a KV block."""

KEPT_BITS: Final = 44
"""Of a hash, its last ones: all that the registry keeps. In a fleet of 10,000 caches of 450,000
tokens, one of 250,000 hashes that are in none of them is then taken for one that is."""

HASH_BYTES: Final = 6
LINK_BYTES: Final = 8


def chain_hashes(tokens: Sequence[int], tokens_per_hash: int, *, salt: str = "") -> tuple[int, ...]:
    """One 64-bit hash per full block of tokens, each over the one before it and its own tokens.

    So a hash names the whole prefix up to its block, as vLLM's block hashes do. `salt` is what else
    decides on the KV cache, above all the model, then adapters. The control plane never computes a
    hash: any other 64-bit chain hash will do where all workers of a model and the routers share it.
    """
    parent = seed(salt)
    hashes = []
    for end in range(tokens_per_hash, len(tokens) + 1, tokens_per_hash):
        parent = following(parent, tokens[end - tokens_per_hash : end])
        hashes.append(hash_of(parent))
    return tuple(hashes)


def seed(salt: str) -> bytes:
    """The link of a chain that is before its first block."""
    return hashlib.blake2b(salt.encode(), digest_size=LINK_BYTES).digest()


def following(link: bytes, block: Sequence[int]) -> bytes:
    """The link of the next block."""
    content = link + struct.pack(f"<{len(block)}q", *block)
    return hashlib.blake2b(content, digest_size=LINK_BYTES).digest()


def hash_of(link: bytes) -> int:
    return int.from_bytes(link, "big")


def prompt_hashes(tokens: Sequence[int], model: str) -> tuple[int, ...]:
    """What a worker publishes of a prompt that it has computed: a hash per TOKENS_PER_HASH tokens.

    `model` is the name that requests have, of an adapter its own.
    """
    return chain_hashes(tokens, TOKENS_PER_HASH, salt=model)


class AskedHashes(NamedTuple):
    """What a router sends of a prompt."""

    hashes: tuple[int, ...] = ()
    tokens_per_hash: int | None = None


NO_HASHES: Final = AskedHashes()


def asked_hashes(tokens: Sequence[int], model: str) -> AskedHashes:
    """The hashes of a prompt; of a long one every second, third, …: they reach to its end."""
    hashes = prompt_hashes(tokens, model)
    step = max(-(-len(hashes) // MAX_HASHES_PER_REQUEST), 1)
    return AskedHashes(hashes[step - 1 :: step], step * TOKENS_PER_HASH)


def as_text(hashes: Iterable[int]) -> list[str]:
    """As the REST API has them: 16 hexadecimal digits, as JSON has no 64-bit numbers."""
    return [f"{number:016x}" for number in hashes]


def from_text(texts: Iterable[str]) -> tuple[int, ...]:
    return tuple(int(text, 16) for text in texts)


def pack(hashes: Iterable[int]) -> bytes:
    """Six bytes each, as much as is kept of them."""
    kept = (1 << KEPT_BITS) - 1
    return b"".join((number & kept).to_bytes(HASH_BYTES, "big") for number in hashes)


def unpack(packed: bytes) -> tuple[int, ...]:
    ends = range(HASH_BYTES, len(packed) + 1, HASH_BYTES)
    return tuple(int.from_bytes(packed[end - HASH_BYTES : end], "big") for end in ends)
