"""The router over TLS on both sides: to its clients and to the control plane."""

from __future__ import annotations

import json
import ssl
from pathlib import Path

import httpx2
import pytest

from kvxfer.client import Credentials
from kvxfer.event_stream import EventParser
from kvxfer.instances import Role
from kvxfer.web.tls import ServerTls
from tests.network import worker_app
from verify.processes.certificates import make_certificates
from verify.processes.control_plane import RunningControlPlane

from .servers import DECODES, PREFILLS, RunningRouter, http_worker

pytestmark = pytest.mark.native

ASKED = {"model": "llama", "prompt": "hi"}


async def test_router_and_control_plane_over_https(tmp_path: Path) -> None:
    ours, theirs = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "theirs")
    router_tls = ServerTls(ours.server_cert, ours.server_key)
    # The control plane also asks for client certificates, from another CA than the router's
    # clients.
    fleet_tls = ServerTls(theirs.server_cert, theirs.server_key, theirs.ca_file)
    known = Credentials(
        ca_file=theirs.ca_file, cert_file=theirs.client_cert, key_file=theirs.client_key
    )
    with (
        RunningControlPlane(lease_seconds=600, tls=fleet_tls) as control_plane,
        RunningRouter(control_plane.url, credentials=known, tls=router_tls) as router,
    ):
        assert router.url.startswith("https://")
        async with (
            http_worker(control_plane.url, "p", Role.PREFILL, worker_app(PREFILLS), known),
            http_worker(control_plane.url, "d", Role.DECODE, worker_app(DECODES), known),
            httpx2.AsyncClient(
                base_url=router.url, verify=ssl.create_default_context(cafile=ours.ca_file)
            ) as client,
        ):
            answer = await client.post("/v1/completions", json=ASKED)
            assert answer.json()["choices"][0]["text"] == "ab"
            answer = await client.post("/v1/completions", json={**ASKED, "stream": True})
            *chunks, done = (event.data for event in EventParser().feed(answer.content))
            texts = [c["text"] for chunk in chunks for c in json.loads(chunk)["choices"]]
            assert ("".join(texts), done) == ("ab", "[DONE]")
        async with httpx2.AsyncClient() as stranger:
            with pytest.raises(httpx2.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{router.url}/healthz")
            with pytest.raises(httpx2.RemoteProtocolError):
                await stranger.get(f"{router.url.replace('https', 'http')}/healthz")


def test_control_plane_that_the_router_does_not_trust_is_named(tmp_path: Path) -> None:
    ours = make_certificates(tmp_path)
    tls = ServerTls(ours.server_cert, ours.server_key)
    with (
        RunningControlPlane(tls=tls) as control_plane,
        RunningRouter(control_plane.url, deadline=0.3) as router,
        httpx2.Client(base_url=router.url) as client,
    ):
        answer = client.post("/v1/completions", json=ASKED)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "untrusted-certificate"
    assert "KVXFER_CA_FILE" in answer.json()["error"]["message"]
