"""scripts/check-addresses: what it reports in a test, and what it permits."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CHECK = runpy.run_path(str(Path(__file__).parents[1] / "scripts" / "check-addresses"))


@pytest.mark.parametrize(
    "text",
    [
        "url = 'http://127.0.0.1:8080'",  # text
        "url = f'kvx://localhost:7400/{name}'",  # text
        "url = 'redis://[::1]:6379/0'",  # text
        "start('serve', '--port', '18080')",
        "command = ['redis-server', '--port', '6379']",
        "serve(port=8000)",
        "server.bind(('127.0.0.1', 8000))",
        "socket.create_server(('', 4317))",
        "listener = bind('127.0.0.1', 8000)",
        "folder = Path('/tmp/fleet')",  # text
        "lock = '/dev/shm/kvxfer'",  # text
        "folder = tempfile.gettempdir()",
    ],
)
def test_addresses_and_folders_that_other_programs_may_use_are_reported(text: str) -> None:
    assert [line for line, _ in CHECK["problems"](f"\n{text}\n")] == [2]


@pytest.mark.parametrize(
    "text",
    [
        "start('serve', '--port', '0')",
        "start('serve', '--port', str(free_port()))",
        "serve(port=0)",
        "server.bind(('127.0.0.1', 0))",
        "nothing_listens = 'http://127.0.0.1:9'",
        "elsewhere = 'http://10.0.0.7:8000'",
        "'''As at http://127.0.0.1:8080, by default.'''",  # text
        "assert client.url == 'http://127.0.0.1:8080'  # text",  # text
        "folder = tmp_path / 'tmp'",
    ],
)
def test_addresses_and_folders_that_only_the_test_uses_are_permitted(text: str) -> None:
    assert not list(CHECK["problems"](text))
