"""The scaling file: a policy, the backend that applies it, and the worker model of replays."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.scheduler.scaling.policy import ScalingPolicy
from kvxfer.scheduler.scaling.worker_model import WorkerModel

_NAME: Final = r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$"
_AT: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>[^`]*)`)?$", re.DOTALL)


class ScaleTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the scale subresource of one role belongs to; the default is a Deployment.

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
    """Workers are pods: counts go to scale subresources."""

    prefill: ScaleTarget
    decode: ScaleTarget
    namespace: str | None = None
    """None takes the one of the pod or of the kubeconfig."""


class ProcessesConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
    tag_field="kind", tag="processes",
):  # fmt: skip
    """Workers are processes of this host, for development."""

    arguments: tuple[str, ...] = ()
    """Of `kvxfer worker`, for both roles."""
    drain_seconds: float = 60.0
    """How long a worker may finish its requests before it is stopped."""

    def __post_init__(self) -> None:
        if not 0 <= self.drain_seconds <= 86_400:
            raise ValueError(f"drain_seconds is {self.drain_seconds}; write 0 to 86400")


class ScalingFile(ScalingPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All of a scaling file. Without a backend nothing is applied: the plan is a dry run."""

    backend: KubernetesConfig | ProcessesConfig | None = None
    worker_model: WorkerModel = WorkerModel()


def read_scaling_file(path: Path) -> ScalingFile:
    """Reads YAML, or TOML where the name ends in .toml.

    Raises InvalidArgument that names the file, the member, its value and the remedy.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the scaling policy {path} cannot be read: {error}") from error
    return parse_scaling_file(str(path), _parse(path, text))


def read_bundled_policy() -> ScalingFile:
    """The policy that goes with the bundled traces."""
    bundled = resources.files("kvxfer.scheduler.scaling") / "traces" / "policy.toml"
    return parse_scaling_file(str(bundled), tomllib.loads(bundled.read_text(encoding="utf-8")))


def parse_scaling_file(name: str, document: Any) -> ScalingFile:
    document = {} if document is None else document
    try:
        return msgspec.convert(document, ScalingFile)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{name}: {_sentence(str(error), document)}") from error


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidArgument(f"{path} is no TOML: {error}") from error
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise NotBuilt(
            f"{path} is YAML, which needs PyYAML: pip install 'kvxfer[server]', or write TOML "
            "into a file whose name ends in .toml"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidArgument(f"{path} is no YAML: {' '.join(str(error).split())}") from error


def _sentence(message: str, document: Any) -> str:
    """msgspec's words with the path in front and the value that is at fault."""
    found = _AT.match(message)
    what, path = (found["what"], found["path"]) if found else (message, None)
    keys = re.findall(r"\.?([^.\[\]]+)", path or "")
    where = ".".join(keys)
    if unknown := re.match(r"Object contains unknown field `(.*)`", what):
        return f"{'.'.join([*keys, unknown[1]])} is not known; docs/scaling.md lists what is"
    if what.startswith(("Expected", "Invalid")):
        value = document
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else _item(value, key)
        if path == ".backend.kind":
            what = "write kubernetes or processes"
        return f"{where or 'the file'} is {value!r}: {what[0].lower()}{what[1:]}"
    return f"{where}: {what}" if where else what


def _item(value: Any, key: str) -> Any:
    if isinstance(value, list | tuple) and key.isdigit() and int(key) < len(value):
        return value[int(key)]
    return None
