import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvxfer.cli import app
from kvxfer.errors import InvalidArgument

pytestmark = pytest.mark.native

SMALL = ("--quick", "--total", "1", "--pool", "16", "--rounds", "1", "--sizes", "1,64")


def test_tables_show_every_page_size_beside_its_limit_and_target_and_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plot = tmp_path / "throughput.png"
    result = CliRunner().invoke(
        app, ["bench", *SMALL, "--fabrics", "tcp", "--seed", "77", "--plot", str(plot)]
    )
    assert result.exit_code == 0, result.output
    for text in ("1 KiB", "64 KiB", "raw TCP", "≥ 0.50", "≥ 0.85", "seed 77", "back to back"):
        assert text in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_json_holds_every_case() -> None:
    result = CliRunner().invoke(app, ["bench", *SMALL, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [case["name"] for case in report["cases"]] == ["tcp", "local", "local-cma"]
    assert isinstance(report["seed"], int)
    assert {"ratio", "target", "met", "gb_per_s", "pages_per_s", "engine_ns", "limit_ns"} <= set(
        report["cases"][0]["throughput"][0]
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--sizes", "1,x"), "use whole KiB"),
        (("--sizes", "3"), "do not divide"),
        (("--fabrics", "verbs"), "choose from tcp, local, local-cma"),
        (("--total", "64", "--pool", "32"), "use a larger pool"),
        (("--plot", "/no/such/folder/figure.png"), "is not a directory"),
        (("--serve", "--plot", "figure.png"), "--plot has no meaning with --serve"),
        (("--serve", "--to", "host"), "--to has no meaning with --serve"),
        (("--serve", "--json"), "--json has no meaning with --serve"),
        (("--to", "host", "--null"), "--null has no meaning with --to"),
        (("--to", "host", "--idle"), "--idle has no meaning with --to"),
        (("--to", "host", "--port", "1"), "--port has no meaning with --to"),
        (("--to", "127.0.0.1", "--fabrics", "local"), "choose from verbs, ofi, tcp"),
        (("--to", "127.0.0.1", "--sizes", "3"), "do not divide"),
        (("--once",), "--once has no meaning without --serve or --to"),
        (("--pull",), "--pull has no meaning without --serve or --to"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(
    options: tuple[str, ...], reason: str
) -> None:
    result = CliRunner().invoke(app, ["bench", *options])
    assert isinstance(result.exception, InvalidArgument)
    assert reason in str(result.exception)
