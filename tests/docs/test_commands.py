"""All that the documents tell a reader to type exists: commands, options, make targets, scripts and
settings."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvxfer.cli import app
from kvxfer.engine.operator_options import OPERATOR_OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(?:sh|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`\n]+)`")
SETTING = re.compile(r"\bKVXFER_[A-Z][A-Z_]*[A-Z]\b")


def typed(page: Path) -> Iterator[str]:
    """Yields the lines of the page's shell blocks, and each text between backticks."""
    text = page.read_text()
    for block in BLOCK.findall(text):
        whole = re.sub(r"\\\n>? *", " ", block)
        yield from (line.removeprefix("$ ").removeprefix("> ") for line in whole.splitlines())
    yield from INLINE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def commands(page: Path, program: str) -> Iterator[list[str]]:
    """Yields the arguments of each command of this program."""
    for line in typed(page):
        for part in re.split(r"[;&|]+", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a quotation that continues in another part
                continue
            if words and words[0] == program:
                yield words[1:]


@functools.cache
def cli() -> Any:
    """Returns the command of click, on which typer builds."""
    return typer.main.get_command(app)


def unknown(arguments: list[str]) -> str | None:
    """Returns the part of a `kvxfer` command that does not exist, if any."""
    command = cli()
    for word in arguments:
        inner = getattr(command, "commands", None)
        if inner and re.fullmatch(r"[a-z][a-z-]*", word):
            found = inner.get(word)
            if found is None:
                return f"{command.name} {word}"
            command = found
        elif word.startswith("--"):
            options = [[*each.opts, *each.secondary_opts] for each in command.params]
            name = word.split("=")[0].rstrip(",.")
            if name != "--help" and not any(name in each for each in options):
                return f"{command.name} {name}"
    return None


def settings() -> set[str]:
    """Returns the settings of the command line and the engine, and those that any source names."""

    def of(command: Any) -> Iterator[str]:
        for each in command.params:
            names = each.envvar or ()
            yield from [names] if isinstance(names, str) else names
        for inner in getattr(command, "commands", {}).values():
            yield from of(inner)

    named = subprocess.run(
        ["git", "grep", "-hoE", SETTING.pattern.replace(r"\b", ""), "--", ":!docs", ":!*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    operators = (f"KVXFER_{option.upper().replace('.', '_')}" for option in OPERATOR_OPTIONS)
    return {*of(cli()), *operators, *named.stdout.split()}


def test_unknown_commands_and_options_are_found() -> None:
    assert unknown(["serve", "--nothing"]) == "serve --nothing"
    assert unknown(["weights", "nothing"]) == "weights nothing"
    assert unknown(["weights", "plan", "--json"]) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_their_options_exist(page: Path) -> None:
    assert [bad for each in commands(page, "kvxfer") if (bad := unknown(each))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_targets_of_make_and_scripts_exist(page: Path) -> None:
    table = re.findall(r"^suite (\S+) (\S+)", (ROOT / "scripts/run").read_text(), re.MULTILINE)
    suites = {(target, suite.strip("'")) for target, suite in table}
    for words in commands(page, "make"):
        suite = "".join(word.removeprefix("SUITE=") for word in words if word.startswith("SUITE="))
        asked = {(word, suite) for word in words if word[0].islower()}
        assert asked - suites == set()
    scripts = {name for line in typed(page) for name in re.findall(r"(?<!/)\bscripts/[\w-]+", line)}
    assert [name for name in sorted(scripts) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_exist(page: Path) -> None:
    assert {*SETTING.findall(page.read_text())} - settings() == set()


@pytest.mark.parametrize(
    "command",
    [
        "kvxfer weights plan --model kimi-k2 --train 256 --infer 128",
        "kvxfer scale replay day",
    ],
)
def test_commands_that_need_nothing_run(command: str) -> None:
    assert any(command in line for page in PAGES for line in typed(page)), "no page has it"
    subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", *command.split()[1:]],
        stdout=subprocess.DEVNULL,
        check=True,
    )
