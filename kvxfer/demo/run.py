"""One run of the demo: every prompt through the cluster, then through a single process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch

from kvxfer.client import Credentials
from kvxfer.demo.cluster import start_cluster
from kvxfer.demo.report import DemoReport, PromptRun
from kvxfer.demo.router import Routed, Router
from kvxfer.errors import PromptTooLong
from kvxfer.reference.devices import cache_on, device_of
from kvxfer.reference.runner import BLOCK_SIZE, ModelRunner, load_model

_MIN_BLOCKS: Final = 1024

Phase = Literal["start", "cluster", "single"]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    prompts: Sequence[str]
    tokens: int
    """The output tokens per prompt."""
    model: Path | None
    fabrics: Sequence[str] | None
    """The fabrics to use; None takes all that this host has."""
    gpu: int | None
    """The GPU whose memory holds both caches; None for host memory."""


async def run_demo(settings: DemoSettings, progress: Callable[[Phase, int], None]) -> DemoReport:
    """Starts a cluster, routes the prompts through it one after another, stops it, and computes
    the same prompts in this process. `progress` gets the number of prompts that a phase has done.

    Raises InvalidArgument, NotBuilt or PromptTooLong if model and prompts do not fit, ProcessFailed
    if a process of the cluster ends, and the errors that control plane and workers answer. No
    process is left behind in any case.
    """
    progress("start", 0)
    threads = _threads()
    torch.set_num_threads(threads)
    runner, prompts = await asyncio.to_thread(_prepare, settings)
    routed: list[Routed] = []
    async with (
        start_cluster(
            model=settings.model,
            fabrics=settings.fabrics,
            gpu=settings.gpu,
            blocks=max(_MIN_BLOCKS, runner.cache.num_blocks),
            threads=threads,
        ) as cluster,
        Router(cluster.control_plane, credentials=Credentials()) as router,
    ):
        for tokens in prompts:
            progress("cluster", len(routed))
            answers = router.complete(tokens, model=runner.config.name, max_tokens=settings.tokens)
            routed.append(await cluster.run(answers))
    runs: list[PromptRun] = []
    for tokens, both in zip(prompts, routed, strict=True):
        progress("single", len(runs))
        single = await asyncio.to_thread(runner.generate, tokens, settings.tokens, ignore_eos=True)
        runs.append(_prompt_run(both, single))
    progress("single", len(runs))
    return DemoReport(runner.config.name, runs)


def _prepare(settings: DemoSettings) -> tuple[ModelRunner, list[list[int]]]:
    """Returns the model of the single process, on the workers' device and with a cache for the
    longest prompt, and the token ids of every prompt."""
    device = device_of(settings.gpu)
    model, tokenizer = load_model(settings.model, device)
    longest = max(len(tokenizer.encode(prompt)) for prompt in settings.prompts)
    blocks = -(-(longest + settings.tokens) // BLOCK_SIZE)
    runner = ModelRunner(model, tokenizer, cache_on(device, model.config, blocks, BLOCK_SIZE))
    try:
        runner.blocks_for(longest, settings.tokens)
    except PromptTooLong as error:
        raise PromptTooLong(f"{error}, or split the text with more --prompts") from None
    return runner, [runner.encode(prompt) for prompt in settings.prompts]


def _threads() -> int:
    """Returns the number of torch's threads in each worker and in the single process: the same
    everywhere, because the parts of a sum decide its last bits, and half the cores, because two
    workers share them."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _prompt_run(both: Routed, single: list[int]) -> PromptRun:
    prefill, decode = both.prefill, both.decode
    return PromptRun(
        prompt_tokens=decode.usage.prompt_tokens,
        tokens=tuple(decode.choices[0].token_ids),
        single_process_tokens=tuple(single),
        fabric=prefill.transfer.fabric,
        bytes=prefill.transfer.bytes,
        pages=prefill.transfer.pages,
        writes=prefill.transfer.writes,
        transfer_seconds=prefill.transfer.seconds,
        prefill_seconds=prefill.timings.prefill,
        visible_transfer_seconds=decode.timings.visible_transfer,
        first_token_seconds=both.pairing_seconds + decode.timings.first_token,
    )
