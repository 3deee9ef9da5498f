import pytest

from kvxfer.bench.cases import CASES
from kvxfer.bench.figures import connect_figure, latency_figure, throughput_figure

MIB = 1 << 20


def test_throughput_is_the_median_round_and_the_ratio_is_the_median_of_ratios() -> None:
    figure = throughput_figure(
        CASES["tcp"],
        1024,
        MIB,
        engine_ns=[[500, 1500], [4000, 4000], [1000, 3000]],
        limit_ns=[[1000, 800], [1000, 1000], [3000, 800]],
    )
    assert figure.gb_per_s == MIB / 2000
    assert figure.limit_gb_per_s == MIB / 1000
    assert figure.pages_per_s == pytest.approx(1024 / 2000e-9)
    assert figure.limit_pages_per_s == pytest.approx(1024 / 1000e-9)
    assert figure.ratio == pytest.approx(0.9)


@pytest.mark.parametrize(("engine_ns", "met"), [(1999, True), (2000, True), (2001, False)])
def test_a_target_is_met_at_its_ratio(engine_ns: int, met: bool) -> None:
    figure = throughput_figure(CASES["tcp"], 1024, MIB, [[engine_ns]], [[1000]])
    assert (figure.target.bound, figure.met) == (0.5, met)


def test_latency_percentiles_are_over_all_samples_and_the_ratio_over_rounds() -> None:
    figure = latency_figure(
        4096, 0, engine_ns=[[10, 20, 30], [40, 50, 60]], limit_ns=[[10, 10, 10], [10, 10, 10]]
    )
    assert (figure.engine_p50_ns, figure.limit_p50_ns) == (35, 10)
    assert figure.engine_p99_ns == pytest.approx(59.5)
    assert figure.ratio == pytest.approx((2 + 5) / 2)


def test_connect_keeps_its_samples() -> None:
    figure = connect_figure("tcp", [300, 100, 200], [30, 10, 20])
    assert (figure.p50_ns, figure.limit_p50_ns) == (200, 20)
    assert (figure.engine_ns, figure.limit_ns) == ([300, 100, 200], [30, 10, 20])
