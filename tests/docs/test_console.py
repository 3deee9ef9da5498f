"""The output of a command is compared with that in the document."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.console import Shell, Step, sessions
from verify.polling import wait_until
from verify.stability import state

pytestmark = pytest.mark.native

DOCUMENT = """\
# Title

## First

Words, and `$ no command`.

```console
$ for n in 1 2; do
>   echo $n
> done
1
2
$ true
```

```sh
$ no command either
```

## Second

```console
$ false
```
"""


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    shell = Shell(tmp_path)
    yield shell
    shell.close()


def test_commands_and_their_output_are_found():
    assert sessions(DOCUMENT) == {
        "First": [Step("for n in 1 2; do\n  echo $n\ndone", ["1", "2"]), Step("true", [])],
        "Second": [Step("false", [])],
    }


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("true", []),
        ("echo a; echo b", ["a", "b"]),
        ("echo 17 of 64", ["... of 64"]),
        ("printf unfinished", ["unfinished"]),
        ("echo trouble >&2; false", ["trouble"]),
    ],
)
def test_output_as_documented_passes(shell, command, output):
    shell.take(Step(command, output))


def test_each_shell_has_all_ports_for_itself(tmp_path: Path, shell: Shell) -> None:
    program = "import socket, time; s = socket.create_server(('127.0.0.1', 18080)); "
    program += "print('listens', flush=True); time.sleep(1000)"
    with contextlib.closing(Shell(tmp_path)) as other:
        for number, each in enumerate((shell, other)):
            each.take(Step(f'python -c "{program}" > {number} 2>&1 &', []))
            each.take(
                Step(f"until [ -s {number} ]; do sleep 0.05; done; cat {number}", ["listens"])
            )


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("echo a", ["b"]),
        ("echo a", []),
        ("true", ["a"]),
        ("echo a; echo b", ["a"]),
        ("echo 1 000; echo 9 200", ["... 200"]),
        ("false", []),
        ("exit 0", []),
    ],
)
def test_output_other_than_documented_fails(shell, command, output):
    with pytest.raises(AssertionError):
        shell.take(Step(command, output))


def test_a_shell_remembers_what_was_done_before(shell):
    shell.take(Step("say() { echo $word; }", []))
    shell.take(Step("word=hello", []))
    shell.take(Step("say", ["hello"]))


def test_programs_end_with_their_shell(tmp_path):
    shell = Shell(tmp_path)
    shell.take(Step("sleep 1000 > log & echo $! > pid; disown", []))
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)
    shell.close()
    wait_until(lambda: state(pid) in ("Z", ""))
