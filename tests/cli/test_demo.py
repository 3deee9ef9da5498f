"""`kvxfer demo` with its real processes: what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from tests.cuda.on_driver import DOUBLE
from verify.polling import wait_until

pytestmark = pytest.mark.native

# Long enough that a test can break something while prompts are under way.
ENDLESS = ["--prompts", "40", "--tokens", "200"]
_START_SECONDS = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, so that starting and computing take no time."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.2,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n\n".join(f"Paragraph {i}: " + "moving pages " * 20 for i in range(40)))
    return path


def demo(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "kvxfer.cli", "demo", *map(str, arguments)]


def run_demo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    if "--gpu" in arguments and "KVXFER_TEST_CUDA" not in environment:
        environment["LD_LIBRARY_PATH"] = str(DOUBLE)
    result = subprocess.run(
        demo(*arguments), capture_output=True, text=True, check=False, env=environment
    )
    print(result.stderr)
    return result


def processes_below(pid: int) -> dict[int, str]:
    """Returns the process ids and command lines of the running children of a process."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            line = (status.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # the process has ended
        if parent == pid and line:
            found[int(status.parent.name)] = line
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class RunningDemo:
    """A demo that has prompts under way."""

    def __init__(self, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            demo(*arguments), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.children: dict[int, str] = {}
        wait_until(self._prompts_are_under_way, _START_SECONDS)

    def _prompts_are_under_way(self) -> bool:
        """True if all children run and are connected: a connected worker has got a request."""
        assert self.process.poll() is None
        self.children = processes_below(self.process.pid)
        return len(self.children) == 3 and len(_connections(self.process.pid)) >= 3

    def child(self, name: str) -> int:
        return next(pid for pid, line in self.children.items() if name in line)

    def end(self) -> tuple[int, str]:
        """Waits for the end; returns the exit code and the text of stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, " ".join(errors.split())


def _connections(pid: int) -> list[str]:
    """Returns the established TCP connections of a process."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return [line for line in lines if line.split()[3] == "01" and line.split()[9] in inodes]


@pytest.fixture
def running_demo(model: Path, text: Path) -> Iterator[RunningDemo]:
    demo = RunningDemo("--model", model, "--prompt-file", text, *ENDLESS)
    yield demo
    demo.process.kill()
    demo.process.communicate()


@pytest.mark.parametrize(
    ("fabric", "memory"),
    [("local", ()), ("tcp", ()), ("local", ("--gpu", "0")), ("tcp", ("--gpu", "0"))],
)
def test_all_tokens_are_those_of_a_single_process(
    fabric: str, memory: tuple[str, ...], model: Path, text: Path
) -> None:
    result = run_demo(
        *("--model", model, "--prompt-file", text, "--prompts", "5", "--tokens", "12"),
        *("--fabric", fabric, *memory, "--json"),
    )
    assert result.returncode == 0
    report = json.loads(result.stdout)
    assert (report["prompts"], report["equal_tokens"], report["tokens"]) == (5, 60, 60)
    assert report["difference"] is None
    assert report["fabrics"] == [fabric]
    # float32 K and V of 2 heads of 16, in 3 layers.
    blocks = sum(-(-run["prompt_tokens"] // 16) for run in report["runs"])
    assert report["pages"] == blocks * 3 * 2
    assert report["bytes"] == blocks * 3 * 2 * 16 * 2 * 16 * 4
    # Every prompt is used whole.
    assert sum(run["prompt_tokens"] for run in report["runs"]) >= len(text.read_text()) - 20


def test_the_demo_model_prints_its_table(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("One paragraph.\n\nAnother one.\n\nThe last.")
    result = run_demo("--prompt-file", tmp_path / "short.txt", "--prompts", "3", "--tokens", "4")
    assert result.returncode == 0
    assert "12 of 12" in result.stdout
    for label in ("bytes moved", "pages", "GB/s", "fabric", "prefill", "visible transfer"):
        assert label in result.stdout


def test_a_folder_without_a_model_is_one_clear_error(tmp_path: Path, text: Path) -> None:
    result = run_demo("--model", tmp_path, "--prompt-file", text)
    assert result.returncode == 1
    assert "[invalid-argument]" in result.stderr
    assert "has no config.json" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_prompt_longer_than_the_context_is_one_clear_error(model: Path, text: Path) -> None:
    result = run_demo("--model", model, "--prompt-file", text, "--prompts", "1")
    assert result.returncode == 1
    assert "[prompt-too-long]" in result.stderr
    assert "more --prompts" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("worker --role prefill", "prefill worker"),
        ("worker --role decode", "decode worker"),
        ("serve", "control plane"),
    ],
)
def test_a_killed_process_is_named_and_nothing_is_left_behind(
    command: str, name: str, running_demo: RunningDemo
) -> None:
    os.kill(running_demo.child(command), signal.SIGKILL)
    code, errors = running_demo.end()
    assert code == 1
    assert f"[process-failed] the {name} was ended by SIGKILL" in errors
    assert "Traceback" not in errors
    assert not any(map(running, running_demo.children))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_stopped_ends_its_processes(
    number: signal.Signals, running_demo: RunningDemo
) -> None:
    os.kill(running_demo.process.pid, number)
    code, errors = running_demo.end()
    assert code != 0
    assert "Traceback" not in errors
    wait_until(lambda: not any(map(running, running_demo.children)))


def test_a_missing_extra_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    }
    result = subprocess.run(demo(), capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert "[not-built] the demo needs torch" in result.stderr
    assert "pip install 'kvxfer[demo]'" in " ".join(result.stderr.split())
