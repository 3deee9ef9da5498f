"""Certificate files for tests, signed by a CA that each test makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """One CA, and its certificates for a server at 127.0.0.1 and for a client."""

    ca: trustme.CA
    ca_file: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    ca = trustme.CA()
    made = Certificates(
        ca,
        *(
            folder / f"{name}.pem"
            for name in ("ca", "server", "server-key", "client", "client-key")
        ),
    )
    ca.cert_pem.write_to_path(made.ca_file)
    issue(ca, "127.0.0.1", made.server_cert, made.server_key)
    issue(ca, "worker@cluster", made.client_cert, made.client_key)
    return made


def issue(ca: trustme.CA, identity: str, cert: Path, key: Path) -> int:
    """Writes a new certificate and its key; returns its serial number."""
    from cryptography.x509 import load_pem_x509_certificate

    issued = ca.issue_cert(identity)
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    return load_pem_x509_certificate(issued.cert_chain_pems[0].bytes()).serial_number
