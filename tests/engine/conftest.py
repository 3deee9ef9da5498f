from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import Engine, Memory, Peer
from tests.engine.fabrics import chosen, engine_options
from verify.polling import PATIENCE

KEY = "a cluster key for the tests"


@dataclass
class Pair:
    """Two connected engines; `to_reader` is the reader as the writer sees it."""

    writer: Engine
    reader: Engine
    to_reader: Peer
    to_writer: Peer


@dataclass
class Star:
    """An engine and its peers; to_hub[i] is the hub as readers[i] sees it."""

    hub: Engine
    readers: list[Engine]
    to_readers: list[Peer]
    to_hub: list[Peer]


@pytest.fixture(params=chosen())
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def new_engine(fabric: str, name: str) -> Engine:
    return Engine(cluster_key=KEY, name=name, **engine_options(fabric))


@pytest.fixture
async def pair(fabric: str) -> AsyncIterator[Pair]:
    async with new_engine(fabric, "writer") as writer, new_engine(fabric, "reader") as reader:
        to_reader = await writer.connect(reader.address, PATIENCE)
        to_writer = await reader.connect(writer.address, PATIENCE)
        yield Pair(writer, reader, to_reader, to_writer)


@pytest.fixture
async def star(fabric: str) -> AsyncIterator[Star]:
    """A hub with three peers."""
    async with (
        new_engine(fabric, "hub") as hub,
        new_engine(fabric, "reader 0") as first,
        new_engine(fabric, "reader 1") as second,
        new_engine(fabric, "reader 2") as third,
    ):
        readers = [first, second, third]
        yield Star(
            hub,
            readers,
            [await hub.connect(reader.address, PATIENCE) for reader in readers],
            [await reader.connect(hub.address, PATIENCE) for reader in readers],
        )


@pytest.fixture
def torch() -> ModuleType:
    """Imports torch. Skips if KVXFER_TEST_FABRICS is set: these tests are about memory, and
    importing torch takes half a minute on the emulated machine of `make test SUITE=verbs`."""
    if os.environ.get("KVXFER_TEST_FABRICS"):
        pytest.skip("KVXFER_TEST_FABRICS chooses fabrics")
    module: ModuleType = pytest.importorskip("torch")
    return module


def bytes_of(memory: Memory) -> NDArray[np.uint8]:
    """Returns a view of the memory."""
    return np.frombuffer(memoryview(memory), dtype=np.uint8)
