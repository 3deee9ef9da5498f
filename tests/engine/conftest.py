from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from kvxfer import Engine, Peer

KEY = "a cluster key for the tests"


@dataclass
class Pair:
    """Two connected engines; `to_reader` is the reader as the writer sees it."""

    writer: Engine
    reader: Engine
    to_reader: Peer
    to_writer: Peer


@pytest.fixture
async def pair(fabric: str) -> AsyncIterator[Pair]:
    async with (
        Engine(cluster_key=KEY, name="writer", fabrics=[fabric]) as writer,
        Engine(cluster_key=KEY, name="reader", fabrics=[fabric]) as reader,
    ):
        to_reader = await writer.connect(reader.address)
        to_writer = await reader.connect(writer.address)
        yield Pair(writer, reader, to_reader, to_writer)
