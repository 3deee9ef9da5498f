"""Models whose KV cache is not one group of equal layers, and quantised caches."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pytest import approx

from verify.processes.vllm.tiny_prompts import prompts

from .conftest import Cluster, checkpoint, cluster_of

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

BLOCK, WINDOW = 128, 200  # as tiny_models.py makes it
NUM_BLOCKS = 200  # at prefill: so few that freed blocks are soon overwritten
# The first token that the last one attends to ends a block, begins one, or is inside one.
EDGES = [WINDOW + 3 * BLOCK + more for more in (-1, 0, 1, 64)]


@dataclass(frozen=True)
class Kind:
    model: str
    layer_groups: list[int]
    dtype: str = "float32"
    more: tuple[str, ...] = ()
    layer_shapes: tuple[int, ...] = ()


KINDS: Mapping[str, Kind] = {
    "sliding": Kind("sliding", [0, 1, 2, 0, 1, 2]),
    # Layers with a window have blocks of twice as many tokens.
    "large": Kind("large", [0, 1, 2, 0, 1, 2], layer_shapes=(1, 1, 0, 1, 1, 0)),
    # On CPUs with AMX vLLM computes MLA with halves only. The results differ when a part of the
    # prompt is in its prefix cache.
    "mla": Kind("mla", [], "bfloat16", ("--dtype", "bfloat16", "--no-enable-prefix-caching")),
    "uneven": Kind("uneven", [], more=("--trust-remote-code",), layer_shapes=(0, 1, 1, 2)),
    # On CPUs vLLM's Mamba 2 does not work with a prefix cache.
    "mamba": Kind(
        "mamba",
        [0] * 3 + [1] * 3,
        more=("--no-enable-prefix-caching",),
        layer_shapes=(0,) * 3 + (1,) * 3,
    ),
    "fp8": Kind("llama", [], "float8_e4m3fn", ("--kv-cache-dtype", "fp8")),
}


@contextlib.contextmanager
def pair_of(kind: Kind, name: str, folder: Path, model: Path) -> Iterator[Cluster]:
    """A pair whose prefill also computes requests without a ticket."""
    # Chunks end within blocks.
    small = ("--max-num-batched-tokens", "600", "--num-gpu-blocks-override", str(NUM_BLOCKS))
    prefill = (*kind.more, *(() if name == "mla" else small))
    with cluster_of(folder / name, model, None, prefill=prefill, decode=kind.more) as cluster:
        yield cluster


def computes_with_fp8() -> bool:
    """True if vLLM has a kernel for an fp8 cache on this processor."""
    return re.search(r"\b(avx512f|amx_tile)\b", Path("/proc/cpuinfo").read_text()) is not None


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, folder: Path, model: Path) -> Iterator[Cluster]:
    kind = KINDS[request.param]
    if request.param == "fp8" and not computes_with_fp8():
        pytest.skip("vLLM computes with an fp8 cache on CPUs with AVX-512 or AMX only")
    made = model if kind.model == "llama" else checkpoint(kind.model, folder)
    with pair_of(kind, request.param, folder, made) as cluster:
        yield cluster


kinds = pytest.mark.parametrize(
    "pair", ["sliding", "large", "uneven", "mamba", "fp8"], indirect=True
)
with_windows = pytest.mark.parametrize("pair", ["sliding", "large"], indirect=True)


def overwrite(cluster: Cluster, rng: random.Random) -> None:
    """Makes prefill use every free block for something else."""
    for _ in range(7):
        cluster.tokens(cluster.prefill, [rng.randrange(3, 512) for _ in range(3500)], max_tokens=1)


def layouts(pair: Cluster) -> list[dict[str, Any]]:
    fleet = httpx2.get(pair.control_plane.url + "/v1/instances").json()["instances"]
    return [instance["layout"] for instance in fleet]


def check_layouts(pair: Cluster) -> None:
    kind = KINDS[pair.fleet.folder.name]
    for layout in layouts(pair):
        assert layout["layer_groups"] == kind.layer_groups
        assert layout["layer_shapes"] == list(kind.layer_shapes)
        assert layout["mla"] == (kind.model == "mla")
        assert layout["dtype"] == kind.dtype


@kinds
def test_tokens_are_those_of_one_server(pair: Cluster, rng: random.Random) -> None:
    asked = prompts(rng, 36)
    asked += [[rng.randrange(3, 512) for _ in range(length)] for length in EDGES]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        apart = list(threads.map(lambda prompt: pair.tokens(pair.router, prompt), asked))
        received = pair.decode.metric("vllm:external_prefix_cache_hits_total")
        again = list(threads.map(lambda prompt: pair.tokens(pair.router, prompt), asked))
        whole = list(threads.map(lambda prompt: pair.tokens(pair.prefill, prompt), asked))
    assert [len(p) for p, a, b in zip(asked, apart, whole, strict=True) if a != b] == []
    assert [len(p) for p, a, b in zip(asked, again, whole, strict=True) if a != b] == []
    assert received > sum(map(len, asked)) / 2, "decode has computed prompts itself"
    pair.wait_until_idle(pair.prefill, pair.decode)
    check_layouts(pair)


@pytest.mark.parametrize("pair", ["mla"], indirect=True)
def test_an_mla_cache_moves_whole_and_gives_the_same_answer_again(
    pair: Cluster, rng: random.Random
) -> None:
    """Asks a pair twice. vLLM's kernels for MLA on a CPU compute one logit in prefill and another
    in decode or beside other requests, so no other server gives the same answer; the pair itself
    does, out of blocks that other prompts have used in between."""

    def moved() -> float:
        name = "vllm:kvxfer_transfer_bytes_total"
        return pair.decode.metric(name, direction="receive")

    asked = [[rng.randrange(3, 512) for _ in range(length)] for length in (2, 17, 18, 100, 333)]
    before = moved()
    answers = [pair.tokens(pair.router, prompt) for prompt in asked]
    assert [pair.tokens(pair.router, prompt) for prompt in reversed(asked)] == answers[::-1]
    pair.wait_until_idle(pair.prefill, pair.decode)
    # Twice, all blocks of the prompt without its last token, which decode computes: vectors of 576
    # halves, in 3 layers. The kernel that vLLM chooses on this CPU sets the block size.
    [size] = {layout["block_size"] for layout in layouts(pair)}
    blocks = sum(math.ceil((len(prompt) - 1) / size) for prompt in asked)
    assert moved() - before == 2 * blocks * size * 576 * 2 * 3
    check_layouts(pair)


@with_windows
@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("way", ["push", "long push", "pull"])
def test_prefill_keeps_what_decode_needs_until_it_asks(
    pair: Cluster, rng: random.Random, way: str, length: int
) -> None:
    """Without the connector, vLLM would free blocks outside the window and soon overwrite them."""
    prompt = [rng.randrange(3, 512) for _ in range(length)]
    if way == "pull":
        params = pair.keep(prompt)
    else:
        opened = pair.open_transfer("late")
        more = 2 * BLOCK if way == "long push" else 1
        pair.tokens(pair.prefill, prompt, max_tokens=more, kv_transfer_params=opened)
        params = opened
    overwrite(pair, rng)
    assert pair.prefill.metric("vllm:kv_cache_usage_perc") > 0, "it has kept nothing"
    tokens = pair.tokens(pair.decode, prompt, kv_transfer_params=params)
    assert tokens == pair.tokens(pair.prefill, prompt)
    pair.wait_until_idle(pair.prefill, pair.decode)


@with_windows
def test_blocks_outside_of_the_window_are_not_sent(pair: Cluster, rng: random.Random) -> None:
    def moved() -> list[float]:
        names = ("vllm:kvxfer_transfer_blocks_total", "vllm:kvxfer_transfer_bytes_total")
        return [pair.decode.metric(name, direction="receive") for name in names]

    before = moved()
    prompt = [rng.randrange(3, 512) for _ in range(3000)]
    params = pair.keep(prompt)
    # All 24 blocks in the group of the two other layers; the blocks of 200 tokens in two groups.
    large = pair.fleet.folder.name == "large"
    blocks = 24 + 2 + 2 if large else 24 + 3 + 3
    assert pair.prefill.metric("vllm:kv_cache_usage_perc") * (NUM_BLOCKS - 1) == approx(blocks)
    pair.tokens(pair.decode, prompt, kv_transfer_params=params)
    pair.wait_until_idle(pair.prefill, pair.decode)
    now = [after - was for after, was in zip(moved(), before, strict=True)]
    # K and V of 2 heads, in two layers: 32 floats, or in `large` 64 or twice as many tokens.
    assert now == [blocks, blocks * 2 * BLOCK * 2 * 2 * (64 if large else 32) * 4]


@kinds
def test_blocks_are_free_again_when_clients_leave(pair: Cluster, rng: random.Random) -> None:
    def leave(prompt: list[int]) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 100, "ignore_eos": True}
        seconds = random.Random(len(prompt)).uniform(0.01, 0.6)
        with contextlib.suppress(httpx2.TimeoutException):
            httpx2.post(pair.router.url + "/v1/completions", json=body, timeout=seconds)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(leave, prompts(rng, 20)))
    pair.wait_until_idle(pair.prefill, pair.decode)
    prompt = prompts(rng, 1)[0]
    assert pair.tokens(pair.router, prompt) == pair.tokens(pair.prefill, prompt)
