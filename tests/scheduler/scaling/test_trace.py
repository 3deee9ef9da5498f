"""Load traces: each row holds until the next one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvxfer.errors import InvalidArgument
from kvxfer.scheduler.scaling.trace import BUNDLED, COLUMNS, Load, parse_trace, read_trace

HEADER = ",".join(COLUMNS)
ROOT = Path(__file__).parents[3]


def test_each_load_holds_until_the_next_one():
    trace = parse_trace("t", [HEADER, "0,5,100,10", "60,8,100,10", "", "90,1,1,1"])
    assert (trace.at(0).requests_per_second, trace.at(59.9).requests_per_second) == (5, 5)
    assert trace.at(60) == Load(8, 100, 10)
    assert trace.end == 90


def test_a_file_is_read(tmp_path):
    file = tmp_path / "load.csv"
    file.write_text(f"{HEADER}\n0,1,2,3\n10,1,2,3\n")
    assert read_trace(str(file)).end == 10


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a,b"], "line 1: the columns are 'a,b'; write seconds,requests_per_second"),
        ([], "line 1: the columns are ''"),
        ([HEADER, "0,1,2"], "line 2: 3 values; write 4"),
        ([HEADER, "0,x,2,3"], "line 2: requests_per_second is 'x'; write a number"),
        ([HEADER, "0,-1,2,3"], "line 2: requests_per_second is '-1'"),
        ([HEADER, "0,nan,2,3"], "line 2: requests_per_second is 'nan'"),
        ([HEADER, "0,1,0,3"], "line 2: a request has at least 1 prompt"),
        ([HEADER, "5,1,2,3"], "line 2: the first row begins at 5 s; begin at 0"),
        ([HEADER, "0,1,2,3", "0,1,2,3"], "line 3: 0 s does not come after 0 s; sort the rows"),
        ([HEADER, "0,1,2,3"], "has 1 rows; write at least two"),
    ],
)
def test_an_invalid_trace_is_refused_with_its_line(lines, words):
    with pytest.raises(InvalidArgument) as refused:
        parse_trace("load.csv", lines)
    assert str(refused.value).startswith("load.csv")
    assert words in str(refused.value)


def test_missing_file_names_the_bundled_ones():
    with pytest.raises(InvalidArgument, match="step, day, burst"):
        read_trace("/nowhere/load.csv")


def test_bundled_traces_are_what_the_script_writes(tmp_path):
    script = tmp_path / "scripts" / "load-traces"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts" / "load-traces").read_text())
    written = tmp_path / "scheduler" / "scaling" / "traces"
    written.parent.mkdir(parents=True)
    subprocess.run([sys.executable, str(script)], check=True)
    for name in BUNDLED:
        bundled = ROOT / "scheduler" / "scaling" / "traces" / f"{name}.csv"
        assert (written / f"{name}.csv").read_text() == bundled.read_text()
        assert read_trace(name).end > 0
