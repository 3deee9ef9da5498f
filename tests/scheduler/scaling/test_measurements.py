"""The measurements that follow from the registry's numbers."""

from __future__ import annotations

import pytest

from kvxfer.instances import Instance, InstanceState, Load, Reserved, Role
from kvxfer.scheduler.scaling.measurements import measure
from verify.processes.control_plane import worker


def instance(name: str, role: str, *, state: str = "ready", **changes: object) -> Instance:
    load = changes.pop("load", Load())
    reserved = changes.pop("reserved", Reserved())
    spec = worker(name, role, **changes)
    return Instance(
        **{field: getattr(spec, field) for field in spec.__struct_fields__},
        epoch=1,
        state=InstanceState(state),
        registered_at=0,
        heartbeat_at=0,
        load=load,  # type: ignore[arg-type]
        reserved=reserved,  # type: ignore[arg-type]
    )


def test_states_loads_and_blocks_are_summed_per_role():
    fleet = [
        instance("p0", "prefill", load=Load(running=1, waiting=4, free_blocks=60)),
        instance("p1", "prefill", load=Load(running=1, waiting=0, free_blocks=64)),
        instance("p2", "prefill", state="joining", load=Load(running=9)),
        instance("p3", "prefill", state="draining", load=Load(running=9)),
        instance("d0", "decode", load=Load(running=7, free_blocks=10)),
        instance("b0", "both", load=Load(running=50)),
    ]
    now = measure(fleet, at=12.5)
    assert now.at == 12.5
    assert (now.prefill.ready, now.prefill.joining, now.prefill.draining) == (2, 1, 1)
    assert (now.prefill.running, now.prefill.waiting) == (2, 4)
    assert (now.prefill.used_blocks, now.prefill.blocks) == (4, 128)
    assert (now.decode.ready, now.decode.running, now.decode.used_blocks) == (1, 7, 54)
    assert now.prefill.current == 3


def test_reserved_blocks_and_used_ones_are_not_added_up():
    fleet = [
        instance("p0", "prefill", load=Load(free_blocks=54), reserved=Reserved(blocks=30)),
        instance("p1", "prefill", load=Load(free_blocks=20), reserved=Reserved(blocks=30)),
        instance("p2", "prefill", reserved=Reserved(blocks=5)),
    ]
    assert measure(fleet, at=0).prefill.used_blocks == 30 + 44 + 5


def test_backlog_of_decode_is_what_prefill_no_longer_has():
    fleet = [
        instance("p", "prefill", load=Load(running=1, waiting=5), reserved=Reserved(transfers=9)),
        instance("d", "decode", reserved=Reserved(transfers=9)),
    ]
    now = measure(fleet, at=0)
    assert (now.prefill.backlog, now.decode.backlog) == (9, 3)
    idle = measure([fleet[0], instance("d", "decode", reserved=Reserved(transfers=2))], at=0)
    assert idle.decode.backlog == 0


def test_rates_are_summed_over_those_that_report_them():
    fleet = [
        instance("p0", "prefill", load=Load(requests_per_second=2, tokens_per_second=100)),
        instance("p1", "prefill", load=Load(requests_per_second=3)),
        instance("p2", "prefill"),
        instance("d0", "decode"),
    ]
    now = measure(fleet, at=0)
    assert (now.prefill.requests_per_second, now.prefill.tokens_per_second) == (5, 100)
    assert (now.decode.requests_per_second, now.decode.tokens_per_second) == (None, None)


def test_latencies_are_averaged_by_requests():
    fleet = [
        instance("d0", "decode", load=Load(requests_per_second=3, ttft_p90=1.0, itl_p90=0.02)),
        instance("d1", "decode", load=Load(requests_per_second=1, ttft_p90=2.0, itl_p90=0.06)),
        instance("d2", "decode", load=Load(requests_per_second=90)),
        instance("p0", "prefill", load=Load(requests_per_second=4, itl_p90=9.0)),
    ]
    now = measure(fleet, at=0)
    assert now.prefill.latency == pytest.approx(1.25), "decode sees the first token"
    assert now.decode.latency == pytest.approx(0.03), "prefill has no token after the first"
    idle = [instance("d0", "decode", load=Load(requests_per_second=0, ttft_p90=1.5))]
    assert measure(idle, at=0).prefill.latency == 1.5
    assert measure([], at=0).prefill.latency is None


def test_only_the_model_that_is_asked_for_counts():
    fleet = [instance("p0", "prefill"), instance("p1", "prefill", model="qwen")]
    assert measure(fleet, at=0).prefill.ready == 2
    assert measure(fleet, at=0, model="qwen").prefill.ready == 1


def test_requested_workers_count():
    now = measure([instance("p0", "prefill")], at=0, requested={Role.PREFILL: 4})
    assert (now.prefill.current, now.decode.current) == (4, 0)
