"""Checks that hold for every value set of the chart: each yields what is wrong, in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from tests.deploy import kubernetes_schemas, programs, queries
from tests.deploy.chart import NAMESPACE, Container, Object, Rendered

Check = Callable[[Rendered], Iterator[str]]


def _called(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


def schemas(release: Rendered) -> Iterator[str]:
    for version in (kubernetes_schemas.OLDEST, kubernetes_schemas.NEWEST):
        for one in release.objects:
            for problem in kubernetes_schemas.problems(one, version):
                yield f"{_called(one)} in Kubernetes {version}: {problem}"


def names(release: Rendered) -> Iterator[str]:
    found = Counter(_called(one) for one in release.objects)
    yield from (f"{name} exists {times} times" for name, times in found.items() if times > 1)
    for one in release.objects:
        if len(one["metadata"]["name"]) > 63 or one["metadata"]["namespace"] != NAMESPACE:
            yield f"{_called(one)} is too long, or in another namespace"


def _labels(release: Rendered) -> list[tuple[Object, Object]]:
    return [(owner, pod["metadata"].get("labels", {})) for owner, pod in release.pods()]


def _selected(release: Rendered, wanted: Object) -> list[Object]:
    return [owner for owner, labels in _labels(release) if wanted.items() <= labels.items()]


def selectors(release: Rendered) -> Iterator[str]:
    """Checks that each selector selects its pods, and that its ports exist there."""
    for one in release.of("Deployment", "Service", "PodDisruptionBudget"):
        wanted = one["spec"]["selector"]
        met = _selected(release, wanted.get("matchLabels", wanted))
        if len(met) != 1:
            yield f"{_called(one)} selects {[_called(owner) for owner in met]}"
        elif one["kind"] == "Service":
            owner, pod = next((o, p) for o, p in release.pods() if o is met[0])
            named = {p["name"] for c in pod["spec"]["containers"] for p in c.get("ports", [])}
            missing = {port["targetPort"] for port in one["spec"]["ports"]} - named
            if missing:
                yield f"{_called(one)} goes to ports {missing} that {_called(owner)} does not have"
    for one in release.of("ServiceMonitor"):
        wanted = one["spec"]["selector"]["matchLabels"]
        met = [
            service
            for service in release.of("Service")
            if wanted.items() <= service["metadata"]["labels"].items()
        ]
        ports = {port["name"] for service in met for port in service["spec"]["ports"]}
        if len(met) != 1 or not {e["port"] for e in one["spec"]["endpoints"]} <= ports:
            yield f"{_called(one)} selects {[_called(service) for service in met]}"
    for one in release.of("PodMonitor"):
        if not _selected(release, one["spec"]["selector"]["matchLabels"]):
            yield f"{_called(one)} selects no pod"
    for one in release.of("HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        spec = release.one(target["kind"], target["name"])["spec"]
        pod = spec["template"]["spec"]
        if "replicas" in spec or not all(
            "cpu" in container["resources"]["requests"] for container in pod["containers"]
        ):
            yield f"{_called(one)}: its target sets replicas, or requests no CPU"


def network(release: Rendered) -> Iterator[str]:
    """Checks that policies select existing pods, and admit all callers that need them."""
    policies = release.of("NetworkPolicy")
    if not policies:
        return
    reached: dict[str, set[str]] = {}
    for one in policies:
        subjects = _selected(release, one["spec"]["podSelector"]["matchLabels"])
        if not subjects:
            yield f"{_called(one)} selects no pod"
        for rule in one["spec"]["ingress"]:
            peers = [
                peer.get("podSelector", {}).get("matchLabels") for peer in rule.get("from", [])
            ]
            callers = {
                labels["app.kubernetes.io/component"]
                for _, labels in _labels(release)
                for peer in peers
                if peer and peer.items() <= labels.items()
            }
            if "from" not in rule:
                callers = {"test"}
            for subject in subjects:
                reached.setdefault(subject["metadata"]["name"], set()).update(callers)
    name = release.objects[0]["metadata"]["labels"]["app.kubernetes.io/instance"]
    needed = {
        name: {"prefill", "decode", "router", "test"},
        f"{name}-router": {"test"},
        f"{name}-prefill": {"decode", "router"},
        f"{name}-decode": {"prefill", "router"},
        f"{name}-registry": {"control-plane"},
    }
    for subject, callers in needed.items():
        if subject in {owner["metadata"]["name"] for owner, _ in release.pods()}:
            missing = callers - reached.get(subject, set())
            if missing:
                yield f"{sorted(missing)} cannot reach {subject}"


def references(release: Rendered) -> Iterator[str]:
    """Checks that secrets, config maps and accounts exist or are named by the operator, and that
    files are mounted."""
    given = str(release.values)
    for owner, pod in release.pods():
        for kind, name, keys in _referred(pod["spec"]):
            if any(one["metadata"]["name"] == name for one in release.of(kind)):
                data = {} if kind == "ServiceAccount" else release.one(kind, name)["data"]
                missing = keys - data.keys()
                if missing:
                    yield f"{_called(owner)}: {kind} {name} has no {sorted(missing)}"
            elif f"'{name}'" not in given:
                yield f"{_called(owner)}: there is no {kind} {name}"
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        mounted = {
            mount["name"]
            for container in pod["spec"]["containers"]
            for mount in container.get("volumeMounts", [])
        }
        if volumes != mounted:
            yield f"{_called(owner)}: volumes {sorted(volumes)}, mounted {sorted(mounted)}"
    for container in release.containers():
        files = _files(container)
        text = [*container.arguments, *(str(e) for e in container.environment.values())]
        for path in re.findall(r"/etc/kvxfer/[a-z./-]+", " ".join(text)):
            # A CA that an operator's Redis URL names is in a Secret, so it does not appear here.
            if path not in files:
                yield f"{container.owner}: nothing is mounted at {path}"
    for container in release.containers():
        url = container.environment.get("KVXFER_CONTROL_PLANE", {}).get("value")
        if url and not release.values["controlPlane"]["externalUrl"]:
            [service] = [s for s in release.of("Service") if f"//{s['metadata']['name']}:" in url]
            if not url.endswith(f":{service['spec']['ports'][0]['port']}"):
                yield f"{container.owner}: {url} is not {_called(service)}"


def _referred(pod: Object) -> Iterator[tuple[str, str, set[str]]]:
    if "serviceAccountName" in pod:
        yield "ServiceAccount", pod["serviceAccountName"], set()
    for volume in pod.get("volumes", []):
        if "secret" in volume:
            items = {item["key"] for item in volume["secret"].get("items", [])}
            yield "Secret", volume["secret"]["secretName"], items
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], set()
    for container in pod["containers"]:
        for entry in container.get("env", []):
            if reference := entry.get("valueFrom", {}).get("secretKeyRef"):
                yield "Secret", reference["name"], {reference["key"]}


def _files(container: Container) -> set[str]:
    """Returns the paths of secrets and config maps; all possible ones of a volume without items."""
    volumes = {volume["name"]: volume for volume in container.pod["spec"].get("volumes", [])}
    found = set()
    for mount in container.spec.get("volumeMounts", []):
        volume, path = volumes[mount["name"]], mount["mountPath"]
        items = volume.get("secret", {}).get("items")
        if items is None:
            items = [{"path": name} for name in ("tls.crt", "tls.key", "ca.crt")]
            items += [{"path": f"{name}.yaml"} for name in ("pairing", "scaling")]
        found |= {f"{path}/{item['path']}" for item in items}
    return found


def commands(release: Rendered) -> Iterator[str]:
    """Checks that the programs take their command lines, environment and preStop."""
    for container in release.containers():
        for problem in programs.problems(container):
            yield f"{container.owner}: {problem}"


def probes(release: Rendered) -> Iterator[str]:
    """Checks that each probe has a route and a port of its program, and its scheme."""
    for container in release.containers():
        kinds = [kind for kind in ("readinessProbe", "livenessProbe") if kind in container.spec]
        serves = "ports" in container.spec
        if serves and len(kinds) != 2:
            yield f"{container.owner} has only {kinds}"
        ports = {port["name"] for port in container.spec.get("ports", [])}
        for kind in (*kinds, *(["startupProbe"] if "startupProbe" in container.spec else [])):
            get = container.spec[kind].get("httpGet")
            if get is None:
                continue
            if get["path"] not in programs.routes(container):
                yield f"{container.owner}: {get['path']} of its {kind} is not a route"
            tls = any(argument.startswith("--tls-cert") for argument in container.arguments)
            if get["port"] not in ports or (get.get("scheme") == "HTTPS") != tls:
                yield f"{container.owner}: its {kind} uses another port or scheme"


def rights(release: Rendered) -> Iterator[str]:
    """Checks that no pod has more rights than it needs. Only the autoscaler calls Kubernetes."""
    for owner, pod in release.pods():
        spec = pod["spec"]
        calls = spec.get("serviceAccountName") is not None
        if not calls and spec.get("automountServiceAccountToken") is not False:
            yield f"{_called(owner)} has a Kubernetes token that it does not use"
        if spec.get("enableServiceLinks") is not False:
            yield f"{_called(owner)} gets service variables that are named like its own"
        for container in spec["containers"]:
            security = container["securityContext"]
            added = security["capabilities"].get("add", [])
            if security["allowPrivilegeEscalation"] or security["capabilities"]["drop"] != ["ALL"]:
                yield f"{_called(owner)} keeps privileges"
            root = spec["securityContext"].get("runAsUser") == 0
            device = any("/" in name for name in container["resources"].get("limits", {}))
            if (root or added) and not (device and added == ["IPC_LOCK"]):
                yield f"{_called(owner)} is root, or has {added}, without an RDMA device"
    granted = [rule for role in release.of("Role", "ClusterRole") for rule in role["rules"]]
    if release.of("ClusterRole"):
        yield "there is a ClusterRole"
    called = programs.kubernetes_calls(release)
    allowed = {
        (group, resource, name, verb)
        for rule in granted
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule["resourceNames"]
        for verb in rule["verbs"]
    }
    if allowed != called:
        yield f"the role allows {sorted(allowed)}, the autoscaler calls {sorted(called)}"


def endings(release: Rendered) -> Iterator[str]:
    """Checks that a pod gets the time that its programs take to stop."""
    for container in release.containers():
        grace = container.pod["spec"].get("terminationGracePeriodSeconds", 30)
        needed = programs.stop_seconds(container)
        if needed >= grace:
            yield f"{container.owner} takes {needed} s to stop and is given {grace}"
        told = "preStop" in container.spec.get("lifecycle", {})
        if container.spec.get("ports") and container.component != "registry" and not told:
            yield f"{container.owner} is stopped while requests still come"
    shared = release.values["registry"]["kind"] != "embedded"
    for one in release.of("Deployment"):
        if one["metadata"]["labels"]["app.kubernetes.io/component"] == "control-plane":
            rolls = one["spec"]["strategy"].get("rollingUpdate", {}).get("maxUnavailable") == 0
            if rolls != shared:
                yield f"{_called(one)} is replaced by {one['spec']['strategy']}"


def policies(release: Rendered) -> Iterator[str]:
    """Checks that the control plane can read scaling, pairing and the registry's URL."""
    yield from programs.policy_problems(release)


def metrics(release: Rendered) -> Iterator[str]:
    """Checks that every metric of the dashboard and the alerts exists."""
    known = queries.metric_names()
    for where, expression in queries.expressions(release):
        for name in sorted(set(re.findall(r"\b(?:kvxfer|vllm:kvxfer)_[a-z0-9_]+", expression))):
            if name not in known:
                yield f"{where}: there is no metric {name}"


CHECKS: Final[dict[str, Check]] = {
    check.__name__: check
    for check in (
        schemas,
        names,
        selectors,
        network,
        references,
        commands,
        probes,
        rights,
        endings,
        policies,
        metrics,
    )
}
