"""The first inputs of each corpus, from real encodings: `python -m verify.fuzz.seeds` writes them.

A fuzzer finds the way into a decoder faster from something that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from verify.fuzz.seeds import engine, http, kv, registry

CORPUS: Final = Path(__file__).parents[1] / "corpus"

Seeds: TypeAlias = Mapping[str, Callable[[], Iterator[bytes]]]

NATIVE: Final[Seeds] = {
    "handshake": engine.handshake,
    "bootstrap": engine.bootstrap,
    "control": engine.control,
    "tcp_lane": engine.tcp_lane,
    "local_path": engine.local_path,
    "rendezvous": engine.rendezvous,
    "descriptors": engine.descriptors,
}
PYTHON: Final[Seeds] = {
    "messages": kv.messages,
    "tickets": kv.tickets,
    "answers": http.answers,
    "router_bodies": http.router_bodies,
    "sglang_bootstrap": http.sglang_bootstrap,
    "endpoint": kv.endpoint,
    "brokered": kv.brokered,
    "redis_records": registry.redis_records,
    "spans": http.spans,
}
