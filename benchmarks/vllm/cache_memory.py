"""Measures how fast pages of vLLM's KV cache in host memory move to another process of this host.

Compares three kinds of memory: vLLM's cache with the connector's SharedCache, vLLM's cache without
it, and `engine.alloc()`. Run in vLLM's environment: `make bench SUITE=vllm-cache`. Exit code 1 if
the cache misses its target.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import numpy as np
import torch
from rich.console import RenderableType
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from benchmarks.output import show
from kvxfer.bench import pattern
from kvxfer.bench.cases import SourceMemory
from kvxfer.bench.machine import Machine, this_machine
from kvxfer.bench.pages import PageDraw
from kvxfer.bench.pair import Pair, connected_pair, receiver_engine
from kvxfer.bench.receiver_process import receiver_process
from kvxfer.bench.render import columns, heading, judged, verdict_table
from kvxfer.bench.targets import VLLM_CACHE, Verdict, judge
from kvxfer.bench.throughput import in_turn
from kvxfer.cli.output import err
from kvxfer.connectors.vllm.shared_cache import SharedCache
from kvxfer.errors import KvxferError
from verify.arguments import above_zero

POOL_BYTES: Final = 512 << 20
REQUEST_BYTES: Final = 64 << 20
PAGE_BYTES: Final = (4 << 10, 16 << 10, 64 << 10)
LAYERS: Final = 8


def vllm_cache() -> torch.Tensor:
    """Returns the bytes of all layers of a cache as vLLM allocates it in host memory."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    layer_bytes = POOL_BYTES // LAYERS
    names = [f"model.layers.{index}.self_attn.attn" for index in range(LAYERS)]
    config = KVCacheConfig(
        num_blocks=layer_bytes // spec.page_size_bytes,
        kv_cache_tensors=[KVCacheTensor(POOL_BYTES, names, layer_bytes, spec.page_size_bytes)],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )
    caches = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout.LBHNC)
    storage = caches[names[0]].untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


@contextlib.contextmanager
def of_cache(pair: Pair, cache: torch.Tensor) -> Iterator[Pair]:
    """Gives the pair, with this cache as its source."""
    pattern.fill(cache.numpy())
    region = pair.engine.register(cache)
    try:
        yield replace(pair, region=region)
    finally:
        region.close()


@dataclass(frozen=True, slots=True)
class CacheFigure:
    """Pages of one size: GB/s by source, and the shared cache's ratio to engine.alloc()."""

    page_bytes: int
    gb_per_s: Mapping[str, float]
    ratio: float


@dataclass(frozen=True, slots=True)
class CacheReport:
    started_at: str
    machine: Machine
    rounds: int
    figures: list[CacheFigure]
    verdict: Verdict
    """The ratio at the page size where the cache is slowest beside engine.alloc()."""


SOURCES: Final = ("engine.alloc()", "vLLM's cache", "vLLM's cache, without SharedCache")


async def measure(rounds: int, seed: int) -> CacheReport:
    started_at, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    with SharedCache(logging.getLogger(__name__)):
        shared = vllm_cache()
    async with (
        receiver_process(POOL_BYTES) as process,
        receiver_engine(process.channel, ("local",)) as receiver,
        connected_pair(process.channel, receiver, SourceMemory.ALLOCATED, POOL_BYTES) as pair,
    ):
        with of_cache(pair, shared) as of_shared, of_cache(pair, vllm_cache()) as of_torchs:
            figures = []
            for page_bytes in PAGE_BYTES:
                draw = PageDraw(seed, page_bytes, REQUEST_BYTES, POOL_BYTES, requests=4)
                movers = [each.transfer for each in (pair, of_shared, of_torchs)]
                taken = await in_turn(movers, draw, rounds, lambda: None)
                figures.append(_figure(page_bytes, taken))
    worst = min(figure.ratio for figure in figures)
    return CacheReport(started_at, machine, rounds, figures, judge(worst, VLLM_CACHE))


def _figure(page_bytes: int, taken: list[list[list[int]]]) -> CacheFigure:
    by_round = [np.mean(of_mover, axis=1) for of_mover in taken]
    speeds = [REQUEST_BYTES / float(np.median(each)) for each in by_round]
    ratio = float(np.median(by_round[0] / by_round[1]))
    return CacheFigure(page_bytes, dict(zip(SOURCES, speeds, strict=True)), ratio)


def tables(report: CacheReport) -> Iterator[RenderableType]:
    yield heading(
        report.started_at, report.machine, f"GB/s, medians of {report.rounds} rounds; two processes"
    )
    table = columns("Pages out of host memory", ("pages",), (*SOURCES, "ratio"))
    for figure in report.figures:
        speeds = (f"{figure.gb_per_s[source]:.2f}" for source in SOURCES)
        ratio = judged(figure.ratio, VLLM_CACHE, f"{figure.ratio:.2f}")
        table.add_row(f"{figure.page_bytes >> 10} KiB", *speeds, ratio)
    yield table
    yield verdict_table([report.verdict])


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench SUITE=vllm-cache", description=__doc__)
    parser.add_argument("--rounds", type=above_zero, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print every figure as JSON")
    options = parser.parse_args()
    try:
        with err.status("measuring"):
            report = asyncio.run(measure(options.rounds, options.seed))
    except KvxferError as error:  # such as a host with too little memory
        sys.exit(str(error))
    show(report, tables(report), as_json=options.json)
    return 0 if report.verdict.met else 1


if __name__ == "__main__":
    sys.exit(main())
