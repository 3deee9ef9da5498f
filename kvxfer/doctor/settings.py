"""The environment variables that workers and the control plane share."""

from __future__ import annotations

from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host

_VARIABLES = (
    (
        "KVXFER_CLUSTER_KEY",
        "engines and tickets are authenticated with it",
        'export KVXFER_CLUSTER_KEY="$(openssl rand -hex 32)", the same on every host',
    ),
    (
        "KVXFER_CONTROL_PLANE",
        "workers register there",
        "export KVXFER_CONTROL_PLANE=http://HOST:PORT",
    ),
)


def variables(host: Host) -> list[Finding]:
    """Reports whether each is set; the values stay out of the report."""
    return [
        Finding(Area.SETTINGS, name, Status.OK, "set")
        if host.environment.get(name)
        else Finding(Area.SETTINGS, name, Status.INFO, f"not set; {purpose}", remedy)
        for name, purpose, remedy in _VARIABLES
    ]
