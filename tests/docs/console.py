"""Shell sessions in documents: ```console blocks, and the shell that runs them.

Documents name ports. Each shell has a network namespace, where they are free, whatever else runs on
the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from verify.processes.process import tell_reaper

# A command that waits has its own deadline, of five minutes at most.
_HANG_SECONDS: Final = 400.0
_END: Final = "\x1eend of output"
_PRIVATE: Final = ("KVXFER_", "OTEL_")


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and the lines that it must print; `...` is anything within a line."""

    command: str
    output: Sequence[str]


def sessions(document: str) -> dict[str, list[Step]]:
    """Returns the steps below each heading of the second level: `$ ` begins a command, `> `
    continues it, everything else is output."""
    _, *parts = re.split(r"^## (.+)\n", document, flags=re.MULTILINE)
    return {
        title: [step for block in _blocks(text) for step in _steps(block)]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```console\n\$ (.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL)


def _steps(block: str) -> Iterator[Step]:
    for part in block.split("\n$ "):
        first, *lines = part.splitlines()
        more = list(itertools.takewhile(lambda line: line.startswith("> "), lines))
        yield Step("\n".join([first, *(line[2:] for line in more)]), lines[len(more) :])


# Users other than root become root in a user namespace, if the system allows it.
_APART: Final = ("unshare", "--net", *(() if os.geteuid() == 0 else ("--map-root-user",)))


class Shell:
    """A bash in a folder and in a network namespace. Programs that were started in it end with it,
    and with this process, even if they were not stopped."""

    def __init__(self, folder: Path) -> None:
        kept = {name: v for name, v in os.environ.items() if not name.startswith(_PRIVATE)}
        programs = f"{Path(sys.executable).parent}:{kept['PATH']}"
        # Each process of this shell holds the other end of this pipe until it has ended.
        self._ended, held = os.pipe()
        self._bash = subprocess.Popen(
            [*_APART, "sh", "-c", "ip link set lo up && exec bash --noprofile --norc"],
            cwd=folder,
            env={**kept, "PATH": programs, "COLUMNS": "120", "LC_ALL": "C.UTF-8"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[held],
            process_group=0,
        )
        os.close(held)
        tell_reaper(f"+{self._bash.pid}")

    def take(self, step: Step) -> None:
        """Runs the command. It must print the lines of the step, and if there are none, succeed."""
        printed, code = self._run(step.command)
        as_said = len(printed) == len(step.output) and all(map(_matches, step.output, printed))
        shown = [f"$ {step.command}", *printed, "", "should print", "", *step.output]
        assert as_said, "\n".join(shown)
        assert code == 0 or printed, f"exit code {code} of $ {step.command}"

    def close(self) -> None:
        self._kill()
        self._bash.communicate()
        tell_reaper(f"-{self._bash.pid}")
        os.read(self._ended, 1)
        os.close(self._ended)

    def _run(self, command: str) -> tuple[list[str], int]:
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        hang = threading.Timer(_HANG_SECONDS, self._kill)
        hang.start()
        try:
            self._bash.stdin.write(f"{command}\nprintf '{_END}%d\\n' $?\n")
            self._bash.stdin.flush()
            lines: list[str] = []
            for line in self._bash.stdout:
                text, ended, code = line.rstrip().partition(_END)
                if text or not ended:
                    lines.append(text.rstrip())
                if ended:
                    return lines, int(code)
        finally:
            hang.cancel()
        raise AssertionError("\n".join(["the shell was ended in", f"$ {command}", *lines]))

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._bash.pid, signal.SIGKILL)


def _matches(said: str, printed: str) -> bool:
    return re.fullmatch(re.escape(said).replace(r"\.\.\.", ".*"), printed) is not None
