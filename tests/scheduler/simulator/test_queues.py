"""The simulator against queueing theory: cases whose answers are known."""

from __future__ import annotations

import pytest

from kvxfer.scheduler.scaling.worker_model import WorkerModel

from .queues import SHORTER_OF_TWO, erlang_c, requests, simulated, waits_in_one_queue

# Prefill, network and the step of a larger batch take no time unless a test sets it.
QUICK = {
    "prefill_tokens_per_second": 1e15,
    "itl_per_request": 1e-15,
    "kv_bytes_per_token": 1e-6,
    "kv_blocks": 100_000_000,
}


@pytest.mark.parametrize(("servers", "used"), [(1, 0.5), (4, 0.7), (8, 0.7)])
def test_a_decode_worker_with_c_slots_is_an_m_m_c_queue(servers, used):
    """Erlang C. The waits agree with the formula only on average, but exactly with those of the
    same requests in one queue."""
    model = WorkerModel(**QUICK, itl_base=0.001, batch=servers)
    offered = servers * used
    work = requests(offered, 40_000, prompt=1, output=1000)  # a second each
    result = simulated(work, model, prefill=1, decode=1)
    waits = waits_in_one_queue(work, servers, 0.001)
    assert result.decode_wait == pytest.approx(sum(waits) / len(waits), rel=1e-4)
    assert result.decode_waited == pytest.approx(
        sum(wait > 1e-6 for wait in waits) / len(waits), abs=1e-3
    )
    probability = erlang_c(servers, offered)
    assert result.decode_waited == pytest.approx(probability, rel=0.05)
    assert result.decode_wait == pytest.approx(probability / (servers - offered), rel=0.1)
    assert result.decode_batch == pytest.approx(offered, rel=0.03)


@pytest.mark.parametrize("used", [0.5, 0.8])
def test_a_prefill_worker_is_an_m_d_1_queue(used):
    """Pollaczek and Khinchine: the mean wait is u D / (2 (1 - u))."""
    model = WorkerModel(**{**QUICK, "prefill_tokens_per_second": 1000.0}, itl_base=1e-6)
    work = requests(used, 40_000, prompt=1000, output=1, fixed=True)
    result = simulated(work, model, prefill=1, decode=1)
    assert result.prefill_wait == pytest.approx(used / (2 * (1 - used)), rel=0.08)
    assert result.prefill_waited == pytest.approx(used, rel=0.02)
    assert result.prefill_busy == pytest.approx(used, rel=0.02)


def test_pairing_joins_the_shorter_of_two_queues():
    """The wait with the real pairing code is between that of one queue for both workers, the least
    possible, and that of joining the shorter queue: of two equally long queues, pairing takes the
    one with fewer tokens."""
    used = 0.8
    model = WorkerModel(**{**QUICK, "prefill_tokens_per_second": 1000.0}, itl_base=1e-6)
    work = requests(2 * used, 30_000, prompt=1000, output=1)
    result = simulated(work, model, prefill=2, decode=1)
    one_queue = erlang_c(2, 2 * used) / (2 - 2 * used)
    assert one_queue == pytest.approx(1.778, abs=0.001)
    assert 0.95 * one_queue < result.prefill_wait < 1.05 * SHORTER_OF_TWO
