"""The logs of a process, read from its stderr."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvxfer.logs import AUDIT, redact

pytestmark = pytest.mark.native


TICKET = "eyJhbGciOiJIUzI1NiJ9.eyJqdGkiOiJ0LTEifQ.c2lnbmF0dXJl_-"


def logged(log_format: str, code: str, level: str = "info") -> str:
    script = (
        "import logging; from kvxfer.logs import configure_logging\n"
        f"configure_logging({level!r}, {log_format!r}); log = logging.getLogger('kvxfer.x')\n{code}"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout == ""
    return ended.stderr


def test_json_is_one_object_per_record_with_its_fields():
    (line,) = logged("json", "log.info('%s left', 'p', extra={'epoch': 7})").splitlines()
    record = json.loads(line)
    assert record.pop("timestamp").endswith("Z")
    assert record == {"event": "p left", "epoch": 7, "level": "info", "logger": "kvxfer.x"}


def test_text_names_level_logger_and_fields():
    line = logged("text", "log.warning('left', extra={'epoch': 7})")
    for word in ("warning", "left", "kvxfer.x", "epoch=7"):
        assert word in line


def test_records_below_the_level_are_not_written():
    assert logged("text", "log.info('quiet')", level="warning") == ""


def test_decisions_about_the_fleet_are_logged_at_any_level():
    code = f"logging.getLogger({AUDIT!r}).info('drain', extra={{'caller': 'ops'}})"
    record = json.loads(logged("json", code, level="error"))
    assert (record["event"], record["caller"], record["logger"]) == ("drain", "ops", AUDIT)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_of_errors_are_not_logged(log_format):
    code = (
        "try:\n"
        f"    raise ValueError('bad header Authorization: Bearer s3cr3t-t0ken, ticket {TICKET}')\n"
        "except ValueError:\n"
        f"    log.exception('no %s', '{TICKET}', extra={{'ticket': 'short-one', 'n': 3}})"
    )
    written = logged(log_format, code)
    assert "ValueError" in written
    assert "[redacted]" in written
    for secret in ("s3cr3t", "c2lnbmF0dXJl", "eyJqdGk", "short-one"):
        assert secret not in written


@pytest.mark.parametrize("text", ["", "eyJ is how base64 begins", "kvxfer.api.requests", "a.b.c"])
def test_text_without_a_secret_is_kept(text):
    assert redact(None, "info", {"event": text}) == {"event": text}
