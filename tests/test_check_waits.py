"""scripts/check-waits: what it reports in a test, and what it permits."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check-waits"


@pytest.fixture(scope="module")
def check_waits() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("check_waits", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "text",
    [
        "import time; time.sleep(1)",
        "import time as t; t.sleep(1)",
        "from time import sleep as pause; pause(SECONDS)",
        "import time; nap = time.sleep",
        "import asyncio; asyncio.sleep(0.1, 'answer')",
        "from asyncio import sleep; sleep(delay=0.1)",
        "from kvxfer.clock import SYSTEM_CLOCK; SYSTEM_CLOCK.sleep(1)",
        "page.wait_for_timeout(500)",
        "done.wait(1)",
        "thread.join(timeout=SECONDS)",
        "assert not done.wait(0.1)",
        "assert done.wait(timeout=0.1) is False",
        "assert not select.select([sock], [], [], 0.1)[0]",
        "assert not connection.poll(0.1)",
        "import queue\nwith pytest.raises(queue.Empty): inbox.get(timeout=0.1)",
        "import subprocess\nwith pytest.raises(subprocess.TimeoutExpired): process.wait(0.1)",
        (
            "@pytest.mark.native\nasync def test():\n with pytest.raises(TimeoutError):\n"
            "  await asyncio.wait_for(done.wait(), 0.1)"
        ),
        (
            "import asyncio\npytestmark = pytest.mark.native\nasync def test():\n"
            " done, _ = await asyncio.wait(tasks, timeout=0.1)"
        ),
    ],
)
def test_a_wait_for_an_amount_of_time_is_named(check_waits: ModuleType, text: str) -> None:
    [(line, problem)] = check_waits.Module(f"\n{text}").problems()
    assert line > 1
    assert "waits for an amount of time; poll with verify.polling" in problem


@pytest.mark.parametrize(
    "text",
    [
        "import asyncio; asyncio.sleep(0); asyncio.sleep(0, answer)",
        "import time; time.sleep(0)",
        "assert done.wait(20)",
        "assert process.wait(20) == 0",
        "assert not select.select([sock], [], [], 0)[0]",
        "process.wait(); thread.join(); server.wait('/healthz')",
        "assert not ', '.join(words)",
        "counter.wait(1, timeout=20).result",
        (
            "async def test():\n with pytest.raises(TimeoutError):\n"
            "  await asyncio.wait_for(done.wait(), 60)"
        ),
    ],
)
def test_a_condition_with_a_limit_passes(check_waits: ModuleType, text: str) -> None:
    assert check_waits.Module(text).problems() == []


@pytest.mark.parametrize(
    "text",
    [
        "import time; time.monotonic()",
        "from time import perf_counter as now; now()",
        "import time; Clock(time.time)",
        "from datetime import datetime; datetime.now()",
        "from kvxfer.clock import SYSTEM_CLOCK; SYSTEM_CLOCK.monotonic()",
        "pytestmark = pytest.mark.native\nimport time; time.monotonic_ns()",
    ],
)
def test_a_clock_is_read_in_real_time_only(check_waits: ModuleType, text: str) -> None:
    [(_, problem)] = check_waits.Module(text).problems()
    assert "reads a clock; make the test virtual" in problem
    module = f"pytestmark = pytest.mark.realtime\n{text}"
    assert check_waits.Module(module).problems() == []
    body = text.replace("\n", ";")
    alone = f"@pytest.mark.realtime\ndef test(): {body}\n"
    assert check_waits.Module(alone).problems() == []
    assert len(check_waits.Module(f"{alone}def another(): {body}").problems()) == 1


def test_a_date_may_be_read(check_waits: ModuleType) -> None:
    text = "from kvxfer.clock import SYSTEM_CLOCK; SYSTEM_CLOCK.unix()"
    assert check_waits.Module(text).problems() == []


def test_the_file_is_named_with_the_line(check_waits: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "test_it.py"
    file.write_text("import time\ntime.sleep(1)\n")
    said = check_waits.main([str(tmp_path)])
    assert said.startswith(f"{file}:2: time.sleep waits")
    file.write_text("")
    assert check_waits.main([str(tmp_path)]) == ""
