"""A prefill and a decode instance as SGLang has them, with real engines and without SGLang."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvxfer.connectors.sglang.agent import Agent, MakeSpec
from kvxfer.connectors.sglang.bootstrap import BootstrapServer, Introductions, register
from kvxfer.connectors.sglang.components import components_of, describe
from kvxfer.connectors.sglang.incoming import Incoming
from kvxfer.connectors.sglang.introduction import Introduction
from kvxfer.connectors.sglang.outgoing import Outgoing
from kvxfer.connectors.sglang.pools import Metadata, layout_of, register_pool
from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.settings import BackendSettings
from kvxfer.connectors.sglang.tables import Tables
from kvxfer.model_identity import ModelIdentity
from verify.polling import PATIENCE, wait_until

KEY = b"the cluster key of these tests"
LAYERS, PAGES, PAGE_SIZE, PAGE_BYTES = 3, 12, 16, 512
ROWS, ROW_BYTES = 4, (64, 128)


@dataclass(frozen=True)
class State:
    """One of SGLang's StateTypes: the items of its buffers, and the bytes of an item in each."""

    kind: str
    items: int
    item_bytes: tuple[int, ...]


def buffer_sizes(
    states: Sequence[State] = (), kv_page_bytes: Sequence[int] = (PAGE_BYTES,) * 2 * LAYERS
) -> list[tuple[int, int]]:
    """Returns the items, and the bytes of an item, of each buffer."""
    sizes = [(PAGES, size) for size in kv_page_bytes]
    return sizes + [(state.items, size) for state in states for size in state.item_bytes]


@dataclass
class Instance:
    """One side: its pool, its metadata rows, and the agent that moves them."""

    agent: Agent
    pool: list[np.ndarray[Any, np.dtype[np.uint8]]]
    rows: list[np.ndarray[Any, np.dtype[np.uint8]]]
    metadata: Metadata
    tables: Tables
    pools: str

    def introduction(self, **other: Any) -> Introduction:
        described = {"model": "tiny", "kv_dtype": "bfloat16", "page_size": PAGE_SIZE} | other
        return Introduction(
            self.agent.instance_id,
            self.agent.epoch,
            self.agent.engine_address,
            metadata_bytes=self.metadata.nbytes,
            pools=self.pools,
            **described,
        )

    def outgoing(self) -> Outgoing:
        return Outgoing(self.agent, self.metadata, self.tables)

    def incoming(self, introductions: Introductions, address: str) -> Incoming:
        def check(about: Introduction) -> None:
            about.require_like("tiny", "bfloat16", PAGE_SIZE, self.metadata.nbytes, self.pools)

        incoming = Incoming(self.agent, introductions, self.metadata, self.tables, address, check)
        incoming.introduced()
        return incoming


@contextlib.contextmanager
def instance(
    name: str,
    *,
    epoch: int = 1,
    lease_seconds: float = 10 * PATIENCE,
    control_plane: str | None = None,
    make_spec: MakeSpec | None = None,
    gpu: str | None = None,
    root: Path = Path("/"),
    places: Sequence[int] | None = None,
    states: Sequence[State] = (),
    kv_page_bytes: Sequence[int] = (PAGE_BYTES,) * 2 * LAYERS,
    mla: bool = False,
    checksums: bool = False,
    kv_args: Any = None,
) -> Iterator[Instance]:
    """An instance. `places` are the addresses of its buffers, first of the KV cache, then of
    states; without them, the buffers are in host memory. `kv_args` are SGLang's, of one of its
    pools."""
    settings = BackendSettings(
        cluster_key=KEY,
        lease_seconds=lease_seconds,
        options={"peer_timeout": PATIENCE},
        control_plane=control_plane,
        checksums=checksums,
    )
    sizes = buffer_sizes(states, kv_page_bytes)
    pool = []
    if places is None:
        pool = [np.zeros(size, np.uint8) for size in sizes]
        places = [buffer.ctypes.data for buffer in pool]
    each = [(place, items * size, size) for place, (items, size) in zip(places, sizes, strict=True)]
    kv, rest = each[: len(kv_page_bytes)], iter(each[len(kv_page_bytes) :])
    of_states = [[next(rest) for _ in state.item_bytes] for state in states]
    rows = [np.zeros((ROWS, width), np.uint8) for width in ROW_BYTES]
    args = SimpleNamespace(
        page_size=PAGE_SIZE,
        kv_data_ptrs=[buffer[0] for buffer in kv],
        kv_data_lens=[buffer[1] for buffer in kv],
        kv_item_lens=[buffer[2] for buffer in kv],
        state_types=[state.kind for state in states],
        state_data_ptrs=[[buffer[0] for buffer in state] for state in of_states],
        state_data_lens=[[buffer[1] for buffer in state] for state in of_states],
        state_item_lens=[[buffer[2] for buffer in state] for state in of_states],
        aux_data_ptrs=[row.ctypes.data for row in rows],
        aux_item_lens=list(ROW_BYTES),
    )
    components = components_of(kv_args or args, mla=mla)
    layout = layout_of(components, (kv_args or args).page_size)
    agent = Agent(
        settings,
        name,
        epoch,
        lambda engine: register_pool(engine, components, layout),
        ModelIdentity(),
        make_spec,
        gpu=gpu,
        root=root,
    )
    agent.begin()
    agent.endpoint._connections.connect_timeout = PATIENCE
    try:
        metadata = Metadata(args.aux_data_ptrs, args.aux_item_lens)
        yield Instance(agent, pool, rows, metadata, Tables(components), describe(components))
    finally:
        agent.close()


@dataclass
class Two:
    prefill: Instance
    decode: Instance
    server: BootstrapServer
    introductions: Introductions

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def incoming(self) -> Incoming:
        return self.decode.incoming(self.introductions, self.address)


@contextlib.contextmanager
def two(
    *,
    places: Sequence[Sequence[int] | None] = (None, None),
    kv_args: Sequence[Any] = (None, None),
    **of_both: Any,
) -> Iterator[Two]:
    """Two connected instances; `of_both` are arguments of instance() for both."""
    with (
        instance("prefill", places=places[0], kv_args=kv_args[0], **of_both) as prefill,
        instance("decode", places=places[1], kv_args=kv_args[1], **of_both) as decode,
    ):
        rng = np.random.default_rng(1)
        for buffer in prefill.pool + prefill.rows:
            buffer[:] = rng.integers(1, 256, buffer.shape, np.uint8)
        server = BootstrapServer("127.0.0.1", 0, prefill.agent.settings)
        register(f"http://127.0.0.1:{server.port}", prefill.introduction(), server._settings)
        try:
            yield Two(prefill, decode, server, Introductions(decode.agent.settings))
        finally:
            server.close()


def until(condition: Callable[[], object]) -> None:
    wait_until(condition, pause=0.002)


def ended(*transfers: Incoming | Outgoing) -> None:
    """Waits until all have succeeded or failed."""
    ends = (Progress.SUCCESS, Progress.FAILED)
    until(lambda: all(one.progress in ends for one in transfers))
