"""TLS between clients and `kvxfer serve`: real handshakes, and why they fail."""

from __future__ import annotations

import logging
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.x509 import load_der_x509_certificate

from kvxfer.client import ControlPlaneClient, Credentials, Registration, SyncControlPlaneClient
from kvxfer.errors import (
    ControlPlaneError,
    ControlPlaneUnavailable,
    InvalidArgument,
    UntrustedCertificate,
)
from kvxfer.web.tls import ServerTls
from verify.polling import wait_until
from verify.processes.certificates import Certificates, issue, make_certificates
from verify.processes.control_plane import RunningControlPlane, worker

pytestmark = pytest.mark.native


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path / "ours")


@pytest.fixture
def others(tmp_path: Path) -> Certificates:
    """The certificates of another CA."""
    return make_certificates(tmp_path / "theirs")


@pytest.fixture
def server(certificates: Certificates) -> Iterator[RunningControlPlane]:
    tls = ServerTls(certificates.server_cert, certificates.server_key)
    with RunningControlPlane(tls=tls) as running:
        yield running


@pytest.fixture
def strict_server(certificates: Certificates) -> Iterator[RunningControlPlane]:
    """A control plane that asks for client certificates."""
    tls = ServerTls(certificates.server_cert, certificates.server_key, certificates.ca_file)
    with RunningControlPlane(tls=tls) as running:
        yield running


def trusting(certificates: Certificates) -> Credentials:
    return Credentials(ca_file=certificates.ca_file)


def known(certificates: Certificates) -> Credentials:
    return Credentials(
        ca_file=certificates.ca_file,
        cert_file=certificates.client_cert,
        key_file=certificates.client_key,
    )


def call(url: str, credentials: Credentials) -> None:
    with SyncControlPlaneClient(url, credentials=credentials, deadline=0) as client:
        client.instances()


async def test_worker_registers_and_watches_over_tls(server, certificates):
    assert server.url.startswith("https://127.0.0.1:")
    async with ControlPlaneClient(server.url, credentials=trusting(certificates)) as client:
        watch = client.watch()
        await anext(watch)
        async with Registration(client, worker("p")):
            assert (await anext(watch)).instance.instance_id == "p"
        await watch.aclose()


def test_control_plane_of_another_ca_is_not_trusted(server, others):
    with pytest.raises(UntrustedCertificate, match=r"CERTIFICATE_VERIFY_FAILED.*KVXFER_CA_FILE"):
        call(server.url, trusting(others))


def test_control_plane_under_another_name_is_not_trusted(server, certificates):
    with pytest.raises(UntrustedCertificate, match="'localhost'"):
        call(server.url.replace("127.0.0.1", "localhost"), trusting(certificates))


def test_an_untrusted_certificate_is_not_retried(server, others):
    client = SyncControlPlaneClient(server.url, credentials=trusting(others), deadline=600)
    with client, pytest.raises(UntrustedCertificate):
        client.instances()


def test_plain_http_to_a_tls_port_is_an_error(server):
    with pytest.raises(ControlPlaneUnavailable):
        call(server.url.replace("https", "http"), Credentials())


def test_mutual_tls_serves_clients_with_a_certificate(strict_server, certificates):
    call(strict_server.url, known(certificates))


def test_mutual_tls_refuses_clients_without_a_certificate(strict_server, certificates):
    with pytest.raises(ControlPlaneError, match="KVXFER_CERT_FILE"):
        call(strict_server.url, trusting(certificates))


def test_mutual_tls_refuses_a_certificate_of_another_ca(strict_server, certificates, others):
    stranger = Credentials(
        ca_file=certificates.ca_file, cert_file=others.client_cert, key_file=others.client_key
    )
    with pytest.raises(ControlPlaneError, match="KVXFER_CERT_FILE"):
        call(strict_server.url, stranger)


def test_old_tls_is_refused(server, certificates):
    import socket

    context = ssl.create_default_context(cafile=certificates.ca_file)
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning):
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", server.port)) as raw,
        pytest.raises(OSError, match=r"PROTOCOL_VERSION|EOF"),
    ):
        context.wrap_socket(raw, server_hostname="127.0.0.1")


# --- certificates that change ----------------------------------------------------------------


def served_serial(port: int) -> int:
    pem = ssl.get_server_certificate(("127.0.0.1", port))
    return load_der_x509_certificate(ssl.PEM_cert_to_DER_cert(pem)).serial_number


def test_certificate_is_exchanged_without_a_restart(server, certificates):
    before = served_serial(server.port)
    with SyncControlPlaneClient(server.url, credentials=trusting(certificates)) as connected:
        connected.instances()
        serial = issue(
            certificates.ca, "127.0.0.1", certificates.server_cert, certificates.server_key
        )
        assert serial != before
        wait_until(lambda: served_serial(server.port) == serial)
        connected.instances()
    call(server.url, trusting(certificates))


def test_certificate_that_does_not_match_its_key_changes_nothing(certificates, others, caplog):
    tls = ServerTls(certificates.server_cert, certificates.server_key)
    with RunningControlPlane(tls=tls) as server:
        before = served_serial(server.port)
        with caplog.at_level(logging.ERROR, logger="kvxfer.api"):
            shutil.copy(others.server_cert, certificates.server_cert)
            tls.refresh()
            tls.refresh()
        assert caplog.text.count("stays in force") == 1
        assert served_serial(server.port) == before
        shutil.copy(others.server_key, certificates.server_key)
        tls.refresh()
        call(server.url, trusting(others))


# --- files that do not fit -------------------------------------------------------------------


def test_server_files_that_do_not_fit_are_named(certificates, tmp_path):
    for cert, key, ca, words in (
        (tmp_path / "none", None, None, "none.*No such file"),
        (certificates.server_cert, certificates.client_key, None, "MISMATCH|mismatch"),
        (certificates.server_key, certificates.server_key, None, "cannot be used"),
        (certificates.server_cert, certificates.server_key, tmp_path / "none", "client CA"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            ServerTls(cert, key, ca)


def test_client_files_that_do_not_fit_are_named(certificates, tmp_path):
    for credentials, words in (
        (Credentials(ca_file=tmp_path / "none"), "CA file .*none"),
        (Credentials(ca_file=certificates.client_key), "CA file .*client-key"),
        (Credentials(cert_file=certificates.client_cert), "client certificate"),
        (Credentials(key_file=certificates.client_key), "set KVXFER_CERT_FILE"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            SyncControlPlaneClient("https://127.0.0.1:1", credentials=credentials)


def test_serve_needs_the_certificate_to_the_key(certificates):
    ended = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "serve", "--tls-key", certificates.server_key],
        env={"KVXFER_CLUSTER_KEY": "k" * 32, "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "needs --tls-cert" in ended.stderr
