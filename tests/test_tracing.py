"""Tracing as the environment configures it: on or off, the endpoint, the credentials."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvxfer.client import Credentials, SyncControlPlaneClient
from kvxfer.errors import InvalidArgument, NotBuilt, UnknownTrace
from kvxfer.tracing import setup
from kvxfer.tracing.exporter import TroubleToldOnce
from kvxfer.tracing.setup import start_tracing
from kvxfer.tracing.span import child, current, span
from kvxfer.web.tls import ServerTls
from kvxfer.web.tokens import watch_tokens
from verify.processes.certificates import make_certificates
from verify.processes.control_plane import RunningControlPlane

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
WORKER, ADMIN = "token-of-a-worker", "token-of-an-admin"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENDPOINT, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_TRACES_SAMPLER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {ENDPOINT: " "},
        {ENDPOINT: "http://h:4318", "OTEL_SDK_DISABLED": "true"},
        {ENDPOINT: "http://h:4318", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_nothing_is_traced_unless_the_environment_enables_it(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert start_tracing("worker") is None


def test_an_endpoint_without_the_packages_is_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(ENDPOINT, "http://h:4318")
    monkeypatch.setattr(setup, "is_installed", lambda: False)
    with pytest.raises(NotBuilt, match=r"http://h:4318.*pip install 'kvxfer\[otel\]'"):
        start_tracing("worker")


def test_an_unsupported_protocol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://h:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(InvalidArgument, match=r"'grpc'.*4318"):
        start_tracing("worker")


@pytest.mark.native
def test_opentelemetry_is_not_imported_where_nothing_is_traced() -> None:
    code = (
        "import sys\n"
        "from kvxfer.kv.endpoint import KvEndpoint\n"
        "from kvxfer.tracing.setup import start_tracing\n"
        "assert start_tracing('worker') is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_span_is_begun_if_no_trace_is_recorded() -> None:
    assert current.get() is None
    assert child("a step") is None
    with span("a step") as begun:
        assert begun is None


@pytest.mark.native
@pytest.mark.parametrize("tls", [False, True])
def test_spans_go_to_the_control_plane_with_the_credentials_of_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: bool
) -> None:
    certificates = make_certificates(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"w worker {WORKER}\na admin {ADMIN}\n")
    server = ServerTls(certificates.server_cert, certificates.server_key) if tls else None
    ca_file = certificates.ca_file if tls else None
    with RunningControlPlane(tokens=watch_tokens(tokens), tls=server) as control_plane:
        url = control_plane.url
        monkeypatch.setenv(ENDPOINT, url)
        token_file = tmp_path / "token"
        token_file.write_text(WORKER)
        for name, credentials in (
            ("nobody", Credentials(token="token-of-a-stranger", ca_file=ca_file)),
            ("worker", Credentials(token_file=token_file, ca_file=ca_file)),
        ):
            tracer = start_tracing("worker", name, control_plane=url, credentials=credentials)
            assert tracer is not None
            request = tracer.root("request", request_id=f"of-{name}")
            assert request is not None
            request.end()
            tracer.close()
        admin = Credentials(token=ADMIN, ca_file=ca_file)
        with SyncControlPlaneClient(url, credentials=admin) as client:
            [span] = client.trace("of-worker").spans
            assert (span.service, span.instance_id, span.name) == ("worker", "worker", "request")
            with pytest.raises(UnknownTrace):
                client.trace("of-nobody")


@pytest.mark.native
def test_an_unavailable_endpoint_is_logged_once_and_its_return_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    exporter = TroubleToldOnce(OTLPSpanExporter("http://127.0.0.1:9/v1/traces"), "http://h")
    others = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    for _ in range(3):
        assert exporter.export([]) is SpanExportResult.FAILURE
        others.error("another exporter's")
    exporter._exporter = InMemorySpanExporter()
    for _ in range(2):
        assert exporter.export([]) is SpanExportResult.SUCCESS
    away, *rest = [line for line in caplog.messages if "another" not in line]
    assert away.startswith("spans do not reach http://h, and are lost meanwhile: ")
    assert rest == ["spans reach http://h again"]
    assert caplog.messages.count("another exporter's") == 3


def test_the_environment_overrides_the_service_and_instance_of_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = dict(setup.resource("router", "r-1").attributes)
    assert (own["service.name"], own["service.instance.id"]) == ("router", "r-1")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "zone=eu-1,service.instance.id=pod-7")
    named = dict(setup.resource("router", "r-1").attributes)
    assert named["service.name"] == "edge"
    assert (named["zone"], named["service.instance.id"]) == ("eu-1", "pod-7")


def test_processes_with_the_same_seed_give_spans_different_ids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM gives the generators of its prefill and decode servers the same seed."""
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")

    def traceparent() -> str:
        random.seed(0)
        tracer = start_tracing("worker")
        assert tracer is not None
        begun = tracer.root("kv.send")
        assert begun is not None
        return begun.traceparent  # not ended, so nothing is sent

    _, one_trace, one_span, _ = traceparent().split("-")
    _, other_trace, other_span, _ = traceparent().split("-")
    assert (one_trace != other_trace) and (one_span != other_span)
