"""`kvxfer router` as a command: where it listens, its stop, and why it refuses to start."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from verify.processes.control_plane import RunningControlPlane
from verify.processes.programs import Server, clean_environment, kvxfer

pytestmark = pytest.mark.native

ROUTER = kvxfer("router", "--port", "0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_router_serves_until_it_is_stopped(number: signal.Signals) -> None:
    with RunningControlPlane() as control_plane:
        command = [*ROUTER, "--control-plane", control_plane.url, "--json"]
        with Server("router", *command, environment=clean_environment()) as router:
            assert router.get("/readyz").json() == {"status": "ok"}
            router.stop(number)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--host", "0.0.0.0"], "name the API keys it accepts with --api-keys-file"),
        (["--api-keys-file", "/nowhere"], "the API keys file /nowhere cannot be read"),
        (["--api-keys-file", "KEYS"], "line 2 of the API keys file is not NAME KEY"),
        (["--tls-key", "key.pem"], "--tls-key needs --tls-cert"),
        (["--first-token-seconds", "0"], "first_token_seconds is 0.0; use more than 0"),
        (["--control-plane", "nowhere"], "the control plane's URL is 'nowhere'"),
    ],
)
def test_an_invalid_option_is_one_line(options: list[str], error: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice 0123456789abcdef0123\nbob secret\n")
    ended = subprocess.run(
        [*ROUTER, *(str(keys) if option == "KEYS" else option for option in options)],
        env=clean_environment(COLUMNS="300"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error [invalid-argument] ")
    assert error in " ".join(ended.stderr.split())
    assert "secret" not in ended.stderr
    assert "Traceback" not in ended.stderr
