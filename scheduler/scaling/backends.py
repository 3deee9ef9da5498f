"""The backend that a scaling file names."""

from __future__ import annotations

from pathlib import Path

from kvxfer.scheduler.registry import Registry
from kvxfer.scheduler.scaling.backend import ScalingBackend
from kvxfer.scheduler.scaling.policy_file import KubernetesConfig, ProcessesConfig


def make_backend(
    config: KubernetesConfig | ProcessesConfig | None,
    registry: Registry,
    *,
    control_plane: str,
    cluster_key_file: Path | None = None,
    ticket_keys_file: Path | None = None,
) -> ScalingBackend | None:
    """Makes a backend, before the event loop begins. Returns None if nothing is to be applied.

    Raises NotBuilt and InvalidArgument.
    """
    match config:
        case None:
            return None
        case KubernetesConfig():
            from kvxfer.scheduler.scaling.kubernetes import find_cluster

            return find_cluster(config)
        case ProcessesConfig():
            from kvxfer.scheduler.scaling.processes import ProcessBackend

            return ProcessBackend(
                registry,
                config,
                control_plane=control_plane,
                cluster_key_file=cluster_key_file,
                ticket_keys_file=ticket_keys_file,
            )
