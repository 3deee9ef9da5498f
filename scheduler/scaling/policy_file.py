"""The scaling file: a policy, the backend that applies it, and the worker model of replays."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from kvxfer.scheduler.documents import convert, read_document
from kvxfer.scheduler.scaling.policy import ScalingPolicy
from kvxfer.scheduler.scaling.worker_model import WorkerModel

_NAME: Final = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$"


class ScaleTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The object whose scale subresource counts one role's workers; the default is a Deployment.

    A StatefulSet is apps/v1 statefulsets, a LeaderWorkerSet leaderworkerset.x-k8s.io/v1
    leaderworkersets. Its replicas must each be one registered worker.
    """

    name: str
    group: str = "apps"
    version: str = "v1"
    plural: str = "deployments"

    def __post_init__(self) -> None:
        for field in ("name", "group", "version", "plural"):
            if not re.match(_NAME, getattr(self, field)):
                raise ValueError(
                    f"{field} is {getattr(self, field)!r}; write a name as Kubernetes has them"
                )


class KubernetesConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
    tag_field="kind", tag="kubernetes",
):  # fmt: skip
    """The settings for workers as pods: counts go to scale subresources."""

    prefill: ScaleTarget
    decode: ScaleTarget
    namespace: str | None = None
    """The namespace; None takes that of the pod or of the kubeconfig."""


class ProcessesConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
    tag_field="kind", tag="processes",
):  # fmt: skip
    """The settings for workers as processes of this host, for development."""

    arguments: tuple[str, ...] = ()
    """The arguments of `kvxfer worker`, for both roles."""
    drain_seconds: float = 60.0
    """The time in which a worker may finish its requests before it is stopped."""

    def __post_init__(self) -> None:
        if not 0 <= self.drain_seconds <= 86_400:
            raise ValueError(f"drain_seconds is {self.drain_seconds}; write 0 to 86400")


class ScalingFile(ScalingPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a scaling file. Without a backend nothing is applied: the plan is a dry run."""

    backend: KubernetesConfig | ProcessesConfig | None = None
    worker_model: WorkerModel = WorkerModel()


def read_scaling_file(path: Path) -> ScalingFile:
    """Reads YAML, or TOML if the name ends in .toml.

    Raises InvalidArgument that names the file, the member, its value and the remedy.
    """
    return parse_scaling_file(str(path), read_document(path, "scaling policy"))


def read_bundled_policy() -> ScalingFile:
    """Reads the policy that goes with the bundled traces."""
    bundled = resources.files("kvxfer.scheduler.scaling") / "traces" / "policy.toml"
    return parse_scaling_file(str(bundled), tomllib.loads(bundled.read_text(encoding="utf-8")))


def parse_scaling_file(name: str, document: Any) -> ScalingFile:
    kinds = {".backend.kind": "write kubernetes or processes"}
    return convert(name, document, ScalingFile, reference="docs/scaling.md", remedies=kinds)
