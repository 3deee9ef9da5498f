"""Ranks compute what one process computes, and an updated group equals a fresh one.

Logits are compared in float64, where another order of summation changes only the last digits:
by 1e-9 of values around 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.errors import NotStaged, RankLost
from kvxfer.reference.config import LlamaConfig
from kvxfer.reference.devices import cache_on
from kvxfer.reference.model import LlamaModel
from kvxfer.reference.runner import Model, ModelRunner
from kvxfer.reference.tensor_parallel.model import GroupSettings, TensorParallelModel
from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.weights import seeded_weights
from tests.reference.tiny import TINY
from verify.polling import PATIENCE, wait_until

from .groups import PATIENT, group, told

PROMPT = list(b"a prompt that all ranks compute")
BLOCKS = torch.tensor([5, 0, 7, 2, 31, 30, 29, 28, 1, 3, 4, 6, 8, 9, 10, 11])
CONFIGS = {
    "plain": TINY,
    "biased": replace(TINY, attention_bias=True, mlp_bias=True),
    "tied": replace(TINY, tie_embeddings=True, vocab_size=251),
}


def steps(model: Model, cache: object, tokens: int = 12) -> torch.Tensor:
    """Returns the logits of a prompt and of the tokens after it."""
    logits = [model.prefill(torch.tensor(PROMPT), cache, BLOCKS)]  # type: ignore[arg-type]
    for at in range(tokens - 1):
        token = int(logits[-1].argmax())
        logits.append(model.decode(token, len(PROMPT) + at, cache, BLOCKS))  # type: ignore[arg-type]
    return torch.stack(logits)


def alone(config: LlamaConfig, seed: int, dtype: torch.dtype) -> torch.Tensor:
    model = LlamaModel(config, seeded_weights(config, seed, dtype=dtype))
    return steps(model, cache_on(torch.device("cpu"), config, 32, 4, dtype=dtype))


@pytest.mark.parametrize(("ranks", "variant"), [(1, "plain"), (2, "biased"), (4, "tied")])
def test_logits_are_those_of_one_process_and_after_an_update_of_a_fresh_group(
    ranks: int, variant: str, tmp_path: Path
) -> None:
    config = CONFIGS[variant]
    old, new = (alone(config, seed, torch.float64) for seed in (1, 2))
    with group(ranks, tmp_path, config=config, dtype=torch.float64) as model:
        before = steps(model, model.cache)
        torch.testing.assert_close(before, old, rtol=1e-9, atol=1e-9)
        assert before.argmax(1).tolist() == old.argmax(1).tolist()
        assert torch.equal(steps(model, model.cache), before)

        assert model.apply(model.pin("seed:2")) == 2
        after = steps(model, model.cache)
        torch.testing.assert_close(after, new, rtol=1e-9, atol=1e-9)
    with group(ranks, tmp_path, config=config, seed=2, dtype=torch.float64) as fresh:
        assert torch.equal(steps(fresh, fresh.cache), after)
    if ranks == 1:
        assert torch.equal(before, old)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("told")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[TensorParallelModel]:
    with group(2, folder) as model:
        yield model


def test_greedy_tokens_in_float32(pair: TensorParallelModel) -> None:
    """The logits of seeded weights are so far apart that another order of summation changes
    none."""
    runner = ModelRunner(pair, ByteTokenizer(), pair.cache)
    expected = alone(TINY, 1, torch.float32).argmax(1).tolist()
    assert runner.generate(PROMPT, 12) == expected


def test_no_rank_applies_an_update_that_one_has_not_staged(
    pair: TensorParallelModel, folder: Path
) -> None:
    before = steps(pair, pair.cache)
    for refusing, other in ((0, 1), (1, 0)):
        sign = folder / f"pin-{refusing}"
        sign.touch()
        with pytest.raises(NotStaged, match=f"rank {refusing}: seed:9 is not staged"):
            pair.pin("seed:9")
        sign.unlink()
        assert told(folder, refusing)[-1] == "pin seed:9"
        assert told(folder, other)[-1] == "unpin seed:9"
    assert pair.weights_version == 0
    assert torch.equal(steps(pair, pair.cache), before)


def test_every_rank_reports_that_it_serves_an_update(
    pair: TensorParallelModel, folder: Path
) -> None:
    staged = pair.pin("seed:1")
    pair.apply(staged)
    assert not any(line.startswith("applied") for line in told(folder, 0) + told(folder, 1))
    pair.applied(staged, 0.25)
    assert told(folder, 0)[-1] == "applied 1 True"
    assert told(folder, 1)[-1] == "applied 1 False"


@pytest.mark.parametrize("sign", ["apply-0", "apply-1"])
def test_a_rank_that_fails_while_applying_ends_all(sign: str, tmp_path: Path) -> None:
    with group(2, tmp_path) as model:
        staged = model.pin("seed:2")
        (tmp_path / sign).touch()
        with pytest.raises((RankLost, OSError), match="the memory of the update is gone"):
            model.apply(staged)
        with pytest.raises(RankLost, match=r"the memory of the update is gone.*start it again"):
            steps(model, model.cache)
        wait_until(lambda: not any(runs(each) for each in model.processes))
        assert told(tmp_path, 0)[-1].startswith("broken")


def lost(model: TensorParallelModel) -> bool:
    try:
        model.require()
    except RankLost:
        return True
    return False


def runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.realtime
@pytest.mark.parametrize("when", ["idle", "in a step"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_others_and_is_named(
    when: str, how: signal.Signals, tmp_path: Path
) -> None:
    patience = 1.0
    settings = replace(PATIENT, patience_seconds=patience)
    with group(4, tmp_path, settings=settings) as model:
        steps(model, model.cache)
        victim = model.processes[1]
        begun = SYSTEM_CLOCK.monotonic()
        os.kill(victim, how)
        words = "was ended by SIGKILL" if how is signal.SIGKILL else "is frozen"
        if when == "idle":
            wait_until(lambda: lost(model))
        with pytest.raises(RankLost, match=rf"rank 2 of 4 \(process {victim}\) {words}"):
            while True:
                steps(model, model.cache)
        assert SYSTEM_CLOCK.monotonic() - begun < patience + 2.5
        wait_until(lambda: not any(runs(each) for each in model.processes))


def test_ranks_end_with_rank_0(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from tests.reference.tensor_parallel.groups import group\n"
        "if __name__ == '__main__':\n"
        f"    with group(4, pathlib.Path({str(tmp_path)!r})) as model:\n"
        "        print(*model.processes, flush=True)\n"
        "        sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as leader:
        assert leader.stdout is not None
        ranks = [int(each) for each in leader.stdout.readline().split()]
        assert len(ranks) == 3
        assert all(runs(each) for each in ranks)
        leader.kill()
        wait_until(lambda: not any(runs(each) for each in ranks))


def test_the_error_of_a_group_that_cannot_load_says_why(tmp_path: Path) -> None:
    bad = TensorParallelModel(
        TINY,
        _no_weights,
        ranks=2,
        num_blocks=8,
        block_size=4,
        settings=GroupSettings(start_seconds=4 * PATIENCE),
    )
    with pytest.raises((OSError, RankLost), match="no such checkpoint"), bad:
        pass


def _no_weights() -> dict[str, torch.Tensor]:
    raise OSError("no such checkpoint")
