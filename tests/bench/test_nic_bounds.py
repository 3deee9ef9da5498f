from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvxfer.bench.nic_bounds import NICS, PAGE_KIB, bounds_of
from kvxfer.cli import app

pytestmark = pytest.mark.native


def test_headers_take_their_part_of_the_wire() -> None:
    cx7 = NICS["cx7"]
    assert cx7.wire_gbits(4096) == pytest.approx(400 * 4096 / (4096 + 82 + 20))
    assert cx7.wire_gbits(8192) == pytest.approx(400 * 8192 / (8192 + 2 * 82 + 20))
    assert NICS["efa-p5en"].wire_gbits(4096) == 400


@pytest.mark.parametrize(
    ("page_bytes", "sender_ns", "binds"),
    [(4096, 100.0, "processor"), (4096, 10.0, "writes/s"), (65536, 10.0, "wire")],
)
def test_the_least_bound_binds(page_bytes: int, sender_ns: float, binds: str) -> None:
    assert bounds_of(NICS["cx7"], page_bytes, sender_ns, 1.0).binds == binds
    assert bounds_of(NICS["cx7"], page_bytes, 1.0, sender_ns).binds == binds


@pytest.mark.parametrize("name", NICS)
def test_the_command_measures_the_processor_and_shows_the_rest(name: str) -> None:
    arguments = ["bench", "--nic", name, "--rounds", "1"]
    report = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert [each["page_bytes"] for each in report["bounds"]] == [kib << 10 for kib in PAGE_KIB]
    assert all(each["sender_ns"] > 0 < each["receiver_ns"] for each in report["bounds"])
    shown = CliRunner().invoke(app, arguments).output
    for text in ("256 KiB", "binds", "arXiv 2510.27656", "measured here"):
        assert text in shown


def test_the_error_names_an_unknown_nic() -> None:
    result = CliRunner().invoke(app, ["bench", "--nic", "cx8"])
    assert result.exit_code != 0
    assert "'cx8' is not known; choose from cx7, efa-p5en" in str(result.exception)
