"""The worker side of the vLLM connector: two workers with real engines, driven step by step."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvxfer.connectors.vllm.agent import Agent
from kvxfer.connectors.vllm.plan import Receive, Send, StepPlan
from kvxfer.connectors.vllm.prompt_blocks import NULL_BLOCK
from kvxfer.connectors.vllm.worker import Results, TransferWorker
from kvxfer.engine import Engine
from kvxfer.errors import EngineClosed
from kvxfer.instances import Role
from kvxfer.kv.cache import KvCache
from kvxfer.kv.prefill_session import PrefillSession
from kvxfer.layout import KvLayout
from verify.polling import PATIENCE, wait_until
from verify.processes.control_plane import RunningControlPlane

from .agents import BLOCKS, DIGEST, LAYERS, LAYOUT, agent_of, offered, params, sent

pytestmark = pytest.mark.native


@dataclass
class Side:
    """A worker, the memory of its cache, and its reports so far."""

    agent: Agent
    worker: TransferWorker
    memory: list[np.ndarray[tuple[int, int], np.dtype[np.uint8]]]
    told: Results = field(default_factory=Results)
    outcomes: list[str] = field(default_factory=list)

    def step(self, plan: StepPlan | None = None, finished: tuple[str, ...] = ()) -> None:
        """Runs one step of the engine, with a forward if something is sent."""
        plan = plan or StepPlan()
        self.worker.begin_step(plan)
        if plan.sends:
            for layer in LAYERS:
                self.worker.save_layer(layer)
        self.worker.start_receives()
        self.worker.end_forward()
        results = self.worker.results(finished)
        self.outcomes += [each.outcome for each in results.ended]
        self.told.sent |= results.sent
        self.told.received |= results.received
        self.told.failed |= results.failed

    def steps_until(self, condition: Callable[[], object]) -> None:
        wait_until(lambda: condition() or self.step(), pause=0.002)


@contextlib.contextmanager
def serving(
    role: Role, url: str, layout: KvLayout = LAYOUT, lease_seconds: float = 10 * PATIENCE
) -> Iterator[Side]:
    memory = [np.zeros((BLOCKS, LAYOUT.part_bytes), np.uint8) for _ in LAYERS]

    def make_cache(engine: Engine) -> KvCache:
        return KvCache.register(engine, layout, BLOCKS, [[plane] for plane in memory])

    with agent_of(role, url, make_cache, lease_seconds) as agent:
        yield Side(agent, TransferWorker(agent, LAYERS), memory)


@pytest.fixture
def control_plane() -> Iterator[RunningControlPlane]:
    with RunningControlPlane() as running:
        yield running


@pytest.fixture
def layer_groups() -> tuple[int, ...]:
    return ()


@pytest.fixture
def sides(
    control_plane: RunningControlPlane, layer_groups: tuple[int, ...]
) -> Iterator[tuple[Side, Side]]:
    layout = replace(LAYOUT, layer_groups=layer_groups)
    with (
        serving(Role.PREFILL, control_plane.url, layout) as prefill,
        serving(Role.DECODE, control_plane.url, layout) as decode,
    ):
        rng = np.random.default_rng(1)
        for plane in prefill.memory:
            plane[:] = rng.integers(0, 256, plane.shape, np.uint8)
        yield prefill, decode


@pytest.mark.parametrize("decode_first", [True, False])
def test_a_prompt_arrives_chunk_by_chunk(sides: tuple[Side, Side], decode_first: bool) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    if decode_first:
        decode.step(offered(of, (8, 2, 5), first=1))
    prefill.step(sent(of, (3, 9), 1))
    prefill.step(sent(of, (3, 9, 1), 3))
    prefill.step(sent(of, (3, 9, 1, 10), 4))
    if not decode_first:
        decode.step(offered(of, (8, 2, 5), first=1))
    decode.steps_until(lambda: decode.told.received)
    assert not prefill.told.sent, "vLLM has not finished the request"
    prefill.step(finished=("p", "another"))
    prefill.steps_until(lambda: prefill.told.sent)
    assert (decode.told.received, decode.told.failed) == ({"d"}, set())
    for ours, theirs in zip(prefill.memory, decode.memory, strict=True):
        assert (ours[[9, 1, 10]] == theirs[[8, 2, 5]]).all()
        untouched = sorted(set(range(BLOCKS)) - {8, 2, 5})
        assert not theirs[untouched].any()


def test_a_layer_is_sent_when_it_is_computed_and_not_before(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    computed = [plane[[3, 9, 1, 10]].copy() for plane in prefill.memory]
    for plane in prefill.memory:
        plane[:] = 0xEE  # not computed yet
    decode.step(offered(of, (8, 2, 5, 7)))
    prefill.worker.begin_step(sent(of, (3, 9, 1, 10), 4))
    for layer, name in enumerate(LAYERS):
        prefill.memory[layer][[3, 9, 1, 10]] = computed[layer]
        prefill.worker.save_layer(name)
        # Nothing of a later layer has arrived.
        wait_until(
            lambda layer=layer: (decode.memory[layer][[8, 2, 5, 7]] == computed[layer]).all()
        )
        assert not any(plane.any() for plane in decode.memory[layer + 1 :])
    prefill.worker.end_forward()
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == set()
    prefill.step(finished=("p",))
    prefill.steps_until(lambda: prefill.told.sent)


def test_what_a_forward_did_not_compute_is_never_sent(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    decode.step(offered(of, (8, 2, 5, 7)))
    prefill.worker.begin_step(sent(of, (3, 9, 1, 10), 4))
    prefill.worker.save_layer(LAYERS[0])
    wait_until(lambda: decode.memory[0][[8, 2, 5, 7]].any())
    # The next step begins before this one has ended, with another request.
    other = params(prefill.agent, decode.agent)
    prefill.step(StepPlan(sends=[Send("q", other, DIGEST, 1, ((4,),), 1)]))
    decode.step(StepPlan(receives=[Receive("e", other, DIGEST, 0, ((6,),))]))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told == Results(received={"e"})
    assert not any(plane[[8, 2, 5, 7]].any() for plane in decode.memory[1:])
    prefill.step(StepPlan(cancels={"p": "the test ends"}), finished=("p", "q"))
    prefill.steps_until(lambda: prefill.told.sent == {"p", "q"})


def test_an_idle_step_waits_until_a_transfer_ends_if_there_is_one(
    sides: tuple[Side, Side],
) -> None:
    prefill, decode = sides
    for_ever = StepPlan(idle_seconds=threading.TIMEOUT_MAX)
    decode.step(for_ever)  # returns, as no transfer is under way
    of = params(prefill.agent, decode.agent)
    decode.step(offered(of, (8, 2, 5, 7)))
    waiting = threading.Thread(target=decode.step, args=(for_ever,), daemon=True)
    waiting.start()
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    waiting.join()
    assert decode.told.received == {"d"}
    prefill.step(for_ever)
    prefill.steps_until(lambda: prefill.told.sent)


@pytest.mark.parametrize("layer_groups", [(0, 1, 0)])
def test_the_blocks_of_each_group_that_decode_has_room_for_arrive(
    sides: tuple[Side, Side],
) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    first, second = ((3, 9), (NULL_BLOCK,) * 2), ((3, 9, 1, 10), (NULL_BLOCK, NULL_BLOCK, 2, 7))
    prefill.step(StepPlan(sends=[Send("p", of, DIGEST, 4, first, 2)]))
    prefill.step(StepPlan(sends=[Send("p", of, DIGEST, 4, second, 4)]))
    room = ((8, 2, 5), (NULL_BLOCK, 4, 11))
    decode.step(StepPlan(receives=[Receive("d", of, DIGEST, 1, room)]))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == set()
    places = [([9, 1, 10], [8, 2, 5]), ([2, 7], [4, 11]), ([9, 1, 10], [8, 2, 5])]
    for layer, (source, target) in enumerate(places):
        theirs = decode.memory[layer]
        assert (prefill.memory[layer][source] == theirs[target]).all()
        assert not theirs[sorted(set(range(BLOCKS)) - set(target))].any()
    prefill.step(finished=("p",))
    prefill.steps_until(lambda: prefill.told.sent)


def test_a_kept_prompt_is_fetched_once_it_is_asked_for(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent, bearer=True)
    # The request has ended, so all of it is sent in one step, in which nothing is computed.
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    assert not prefill.told.sent
    decode.step(offered(of, (8, 2, 5), first=1))
    decode.steps_until(lambda: decode.told.received)
    prefill.steps_until(lambda: prefill.told.sent)
    assert (decode.told.received, decode.told.failed) == ({"d"}, set())
    for ours, theirs in zip(prefill.memory, decode.memory, strict=True):
        assert (ours[[9, 1, 10]] == theirs[[8, 2, 5]]).all()


@pytest.mark.parametrize("bearer", [True, False])
def test_prefill_frees_a_prompt_that_decode_releases(
    sides: tuple[Side, Side], bearer: bool
) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent, bearer=bearer)
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    decode.step(StepPlan(releases=[(of, "cached")]))
    prefill.steps_until(lambda: prefill.told.sent)
    decode.step(offered(of, (4, 5, 6, 7)))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == {"d"}


@pytest.mark.parametrize("bearer", [True, False])
def test_prefill_keeps_a_prompt_while_its_request_waits_at_decode(
    control_plane: RunningControlPlane, bearer: bool
) -> None:
    url, short = control_plane.url, 2 * PATIENCE
    with (
        serving(Role.PREFILL, url, lease_seconds=short) as prefill,
        serving(Role.DECODE, url) as decode,
    ):
        of = params(prefill.agent, decode.agent, bearer=bearer)
        prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
        rendezvous = prefill.agent.endpoint._prefill_side

        def kept() -> bool:
            decode.step(StepPlan(waiting=[of]))
            prefill.step()
            return any(session.lease_remaining > short for session in rendezvous.sessions)

        wait_until(kept)
        assert not prefill.told.sent
        decode.step(offered(of, (8, 2, 5), first=1))
        decode.steps_until(lambda: decode.told.received)
        prefill.steps_until(lambda: prefill.told.sent)
        assert (decode.told.received, decode.told.failed) == ({"d"}, set())


def test_a_prompt_that_decode_has_released_is_not_kept_later(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    decode.step(StepPlan(releases=[(of, "aborted")]))
    ledger = prefill.agent.endpoint._ledger
    wait_until(lambda: len(ledger))
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    prefill.steps_until(lambda: prefill.told.sent == {"p"})


def test_the_ticket_of_another_prompt_is_refused_and_stays_valid(
    sides: tuple[Side, Side],
) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent, bearer=True)
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    decode.step(StepPlan(receives=[Receive("other", of, b"another", 0, ((4, 5, 6, 7),))]))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == {"other"}
    decode.told = Results()
    decode.step(offered(of, (8, 2, 5, 6)))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == set()


@pytest.mark.parametrize("end", ["abort", "preemption", "never ran"])
def test_when_prefill_gives_up_decode_fails_at_once(sides: tuple[Side, Side], end: str) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    decode.step(offered(of, (4, 5, 6, 7)))
    if end == "never ran":
        prefill.step(StepPlan(unserved=[(of, "aborted")]))
    else:
        prefill.step(sent(of, (3, 9), 1))
        if end == "abort":
            prefill.step(StepPlan(cancels={"p": "aborted"}), finished=("p",))
            prefill.steps_until(lambda: prefill.told.sent)
        else:
            prefill.step(StepPlan(preempted=["p"]))
            prefill.step(finished=("p",))
            assert not prefill.told.sent, "vLLM has freed these blocks already"
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == {"d"}


def test_an_aborted_decode_request_is_reported_once_and_fails_no_block(
    sides: tuple[Side, Side],
) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    prefill.step(sent(of, (3, 9), 1))
    decode.step(offered(of, (4, 5, 6, 7)))
    decode.step(StepPlan(cancels={"d": "aborted"}))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told == Results(received={"d"})
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    prefill.steps_until(lambda: prefill.told.sent)


def test_an_expired_ticket_fails_on_both_sides(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent, seconds=-60.0)
    decode.step(offered(of, (4, 5, 6, 7)))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == {"d"}
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    prefill.steps_until(lambda: prefill.told.sent == {"p"})


def test_another_prompt_under_the_same_ticket_fails(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    decode.step(StepPlan(receives=[Receive("d", of, b"another", 0, ((4, 5, 6, 7),))]))
    prefill.step(sent(of, (3, 9, 1, 10), 4))
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == {"d"}


def test_a_lost_prefill_worker_fails_blocks_that_it_has_not_sent(sides: tuple[Side, Side]) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    decode.step(offered(of, (4, 5, 6, 7)))
    prefill.step(sent(of, (3, 9), 1))
    prefill.agent.close()
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == {"d"}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that a hanging loop waits for, until the test has ended at most. The engine's wait
    for its loop is shortened."""
    monkeypatch.setattr("kvxfer.connectors.vllm.worker.LOOP_SECONDS", 0.5)
    gate = threading.Event()
    yield gate
    gate.set()


def test_a_defect_in_submitting_writes_costs_only_the_transfers(
    sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    decode.step(offered(of, (4, 5, 6, 7)))
    monkeypatch.setattr(PrefillSession, "write_layer", lambda *_, **__: {}["a defect"])
    prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
    prefill.steps_until(lambda: prefill.told.sent == {"p"})
    assert prefill.agent.lost
    assert "KeyError: 'a defect'" in caplog.text
    decode.steps_until(lambda: decode.told.received)
    assert decode.told.failed == {"d"}


@pytest.mark.parametrize("how", ["stopped", "hung"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_agent_that_ends_costs_only_its_transfers(
    sides: tuple[Side, Side],
    gate: threading.Event,
    side: str,
    how: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode = sides
    of = params(prefill.agent, decode.agent)
    decode.step(offered(of, (4, 5, 6, 7)))
    prefill.step(sent(of, (3, 9), 1))
    rendezvous = prefill.agent.endpoint._prefill_side
    wait_until(lambda: [session.fabric for session in rendezvous.sessions] not in ([], [None]))
    victim = prefill if side == "prefill" else decode
    loop = victim.agent._loop
    loop.call_soon_threadsafe(loop.stop if how == "stopped" else gate.wait)
    if side == "prefill":
        more = Send("q", params(prefill.agent, decode.agent), DIGEST, 4, ((1, 2),), 1)
        prefill.step(StepPlan(sends=[more]), finished=("p", "q"))
        prefill.steps_until(lambda: prefill.told.sent == {"p", "q"})
        decode.steps_until(lambda: decode.told.received)
        assert decode.told == Results(received={"d"}, failed={"d"})
    else:
        decode.step(StepPlan(receives=[Receive("e", of, DIGEST, 0, ((8, 9, 10, 11),))]))
        decode.steps_until(lambda: decode.told.received == {"d", "e"})
        assert decode.told.failed == {"d", "e"}
        before = [plane.copy() for plane in decode.memory]
        prefill.step(sent(of, (3, 9, 1, 10), 4), finished=("p",))
        prefill.steps_until(lambda: prefill.told.sent)
        for now, then in zip(decode.memory, before, strict=True):
            assert (now == then).all(), "bytes came into blocks that were given back"
    wait_until(lambda: victim.agent.lost)
    assert EngineClosed.code in victim.outcomes
    assert "have ended" in caplog.text or "has ended" in caplog.text
    # Later requests fail at once, and nothing raises.
    victim.step(StepPlan(sends=[Send("r", of, DIGEST, 4, ((1,),), 1)]), finished=("r",))
    victim.step(StepPlan(receives=[Receive("s", of, DIGEST, 0, ((0, 1, 2, 3),))]))
    assert "r" in victim.told.sent
    assert "s" in victim.told.failed
