"""Workers as pods: counts go to the scale subresource of a Deployment, StatefulSet,
LeaderWorkerSet, or any other object that has one.

Fencing. A write is a PUT with the resourceVersion that was read before `fence` was called, in that
order: read, fence, write. Kubernetes refuses it (409) if the object changed since the read. A
deposed leader that read before its successor wrote is refused by Kubernetes; one that read
afterwards is refused by the fence. So no write of a successor is ever overwritten by an older
leader. What remains: as long as the successor has not written yet, one write of the deposed leader
that passed its fence before may still land; the successor sees it in its next round.

Kubernetes chooses the pod that goes. Its worker gets SIGTERM and drains by itself, for as long as
its own grace and terminationGracePeriodSeconds let it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvxfer.errors import InvalidArgument, NotBuilt, ScalingFailed
from kvxfer.instances import Role
from kvxfer.scheduler.scaling.backend import Fence, ScalingBackend
from kvxfer.scheduler.scaling.policy_file import KubernetesConfig, ScaleTarget

if TYPE_CHECKING:
    from kubernetes_asyncio.client import ApiClient, Configuration, CustomObjectsApi

_REQUEST_SECONDS: Final = 10.0
# Status updates of a rolling object change its version all the time.
_ATTEMPTS: Final = 5
_CONFLICT: Final = 409
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubernetesBackend(ScalingBackend):
    """A backend that scales one object per role. It connects with its first request."""

    name = "kubernetes"

    def __init__(self, cluster: Configuration, config: KubernetesConfig, *, namespace: str) -> None:
        self._cluster = cluster
        self._api: ApiClient | None = None
        self._namespace = namespace
        self._targets: Mapping[Role, ScaleTarget] = {
            Role.PREFILL: config.prefill,
            Role.DECODE: config.decode,
        }

    async def requested(self, role: Role) -> int:
        return _replicas(await self._read(self._targets[role]))

    async def scale(self, role: Role, wanted: int, fence: Fence) -> None:
        target = self._targets[role]
        for _ in range(_ATTEMPTS):
            scale = await self._read(target)
            if _replicas(scale) == wanted:
                return
            await fence()
            if await self._write(target, scale, wanted):
                return
        raise ScalingFailed(
            f"{self._words(target)} could not be scaled to {wanted}: something else "
            f"changed it {_ATTEMPTS} times in a row; look for another autoscaler on it"
        )

    async def close(self) -> None:
        if self._api is not None:
            await self._api.close()
            self._api = None

    def _objects(self) -> CustomObjectsApi:
        from kubernetes_asyncio.client import ApiClient, CustomObjectsApi

        if self._api is None:
            self._api = ApiClient(self._cluster)
        # The scale routes take any group, version and plural, also the built-in ones.
        return CustomObjectsApi(self._api)

    async def _read(self, target: ScaleTarget) -> dict[str, Any]:
        scale = await self._call(
            target, "read", self._objects().get_namespaced_custom_object_scale, *self._path(target)
        )
        if not isinstance(scale, dict) or not isinstance(scale.get("metadata"), dict):
            raise ScalingFailed(f"{self._words(target)} answered no Scale: {scale!r:.200}")
        return scale

    async def _write(self, target: ScaleTarget, scale: dict[str, Any], wanted: int) -> bool:
        """Writes the count. Returns False if the object changed since `scale` was read."""
        body = {**scale, "spec": {**scale.get("spec", {}), "replicas": wanted}}
        answer = await self._call(
            target,
            "scale",
            self._objects().replace_namespaced_custom_object_scale,
            *self._path(target),
            body,
        )
        return answer is not None

    async def _call(self, target: ScaleTarget, what: str, method: Any, *arguments: Any) -> Any:
        """Returns the answer; None for a conflict."""
        from aiohttp import ClientError
        from kubernetes_asyncio.client import ApiException

        try:
            return await method(*arguments, _request_timeout=_REQUEST_SECONDS)
        except ApiException as error:
            if error.status == _CONFLICT:
                return None
            raise refused(what, self._words(target), error.status, error.reason) from error
        except (ClientError, OSError, TimeoutError) as error:
            raise ScalingFailed(
                f"Kubernetes did not {what} {self._words(target)}: {error or type(error).__name__}"
            ) from error

    def _path(self, target: ScaleTarget) -> tuple[str, str, str, str, str]:
        return target.group, target.version, self._namespace, target.plural, target.name

    def _words(self, target: ScaleTarget) -> str:
        return f"{target.plural}.{target.group} {self._namespace}/{target.name}"


_HINTS: Final = {
    401: "; the service account's token is not accepted",
    403: "; give the service account get and update on its /scale",
    404: "; check namespace, name, group, version and plural in the scaling file",
}


def refused(what: str, target: str, status: int, reason: str | None) -> ScalingFailed:
    """Returns the error of a request that Kubernetes refused."""
    return ScalingFailed(
        f"Kubernetes did not {what} {target}: HTTP {status} {reason}{_HINTS.get(status, '')}"
    )


def _replicas(scale: Mapping[str, Any]) -> int:
    # The API leaves out a count of 0.
    return int(scale.get("spec", {}).get("replicas", 0))


def find_cluster(config: KubernetesConfig) -> KubernetesBackend:
    """Returns a backend on the cluster that this pod runs in, else on the one of the kubeconfig.

    Call it before the event loop begins. Raises NotBuilt if the Kubernetes client is not installed,
    InvalidArgument if no cluster is found.
    """
    try:
        from kubernetes_asyncio import config as discovery
        from kubernetes_asyncio.client import Configuration
    except ModuleNotFoundError as error:
        raise NotBuilt(
            "scaling through Kubernetes needs kubernetes_asyncio, which is not installed: "
            "pip install 'kvxfer[kubernetes]'"
        ) from error

    settings = Configuration()
    try:
        try:
            discovery.load_incluster_config(  # type: ignore[no-untyped-call]
                client_configuration=settings
            )
            namespace = _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
        except discovery.ConfigException:
            asyncio.run(discovery.load_kube_config(client_configuration=settings))
            _, active = discovery.list_kube_config_contexts()
            context = {} if active is None else active.get("context", {})
            namespace = context.get("namespace", "default")
    except (discovery.ConfigException, OSError) as error:
        raise InvalidArgument(
            f"no Kubernetes cluster was found ({error}); run in a pod with a service account, or "
            "name a kubeconfig with KUBECONFIG"
        ) from error
    return KubernetesBackend(settings, config, namespace=config.namespace or namespace)
