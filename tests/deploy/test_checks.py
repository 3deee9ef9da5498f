"""Tests of the chart's checks: each finds the defect that it is made for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.deploy.chart import VALUE_SETS, Object, Rendered, render, value_set
from tests.deploy.checks import CHECKS

FULL = {path.stem: path for path in VALUE_SETS}["ha-external-redis"]


def container(release: Rendered, name: str) -> Object:
    spec: Object = release.one("Deployment", name)["spec"]["template"]["spec"]["containers"][0]
    return spec


def pod(release: Rendered, name: str) -> Object:
    spec: Object = release.one("Deployment", name)["spec"]["template"]["spec"]
    return spec


def renamed_flag(release: Rendered) -> None:
    container(release, "kvxfer")["args"].append("--cluster-secret=x")


def wrong_type(release: Rendered) -> None:
    container(release, "kvxfer-router")["args"].append("--attempts=many")


def renamed_variable(release: Rendered) -> None:
    container(release, "kvxfer-decode")["env"].append({"name": "KVXFER_TOKENFILE", "value": "x"})


def unknown_variable(release: Rendered) -> None:
    container(release, "kvxfer-decode")["args"].append("--label=rack=$(RACK)")


def renamed_drain(release: Rendered) -> None:
    container(release, "kvxfer-decode")["lifecycle"]["preStop"]["exec"]["command"][2] = (
        "--till=idle"
    )


def without_instance(release: Rendered) -> None:
    spec = container(release, "kvxfer-decode")
    spec["env"] = [entry for entry in spec["env"] if entry["name"] != "KVXFER_INSTANCE_ID"]


def wrong_field(release: Rendered) -> None:
    pod(release, "kvxfer")["restartpolicy"] = "Always"


def wrong_port(release: Rendered) -> None:
    release.one("Service", "kvxfer-router")["spec"]["ports"][0]["targetPort"] = "web"


def wrong_selector(release: Rendered) -> None:
    release.one("Service", "kvxfer")["spec"]["selector"]["app.kubernetes.io/component"] = "api"


def duplicate_service(release: Rendered) -> None:
    release.objects.append(release.one("Service", "kvxfer"))


def no_such_secret(release: Rendered) -> None:
    pod(release, "kvxfer-router")["volumes"][0]["secret"]["secretName"] = "elsewhere"


def file_that_is_not_mounted(release: Rendered) -> None:
    pod(release, "kvxfer")["volumes"][0]["secret"]["items"].pop()


def other_port(release: Rendered) -> None:
    for entry in container(release, "kvxfer-prefill")["env"]:
        if entry["name"] == "KVXFER_CONTROL_PLANE":
            entry["value"] = "http://kvxfer:8081"


def no_such_route(release: Rendered) -> None:
    container(release, "kvxfer")["readinessProbe"]["httpGet"]["path"] = "/health"


def other_scheme(release: Rendered) -> None:
    container(release, "kvxfer")["livenessProbe"]["httpGet"]["scheme"] = "HTTPS"


def extra_verb(release: Rendered) -> None:
    release.one("Role", "kvxfer")["rules"][0]["verbs"].append("patch")


def missing_name(release: Rendered) -> None:
    release.one("Role", "kvxfer")["rules"][1]["resourceNames"] = ["kvxfer-prefill"]


def root(release: Rendered) -> None:
    pod(release, "kvxfer-router")["securityContext"]["runAsUser"] = 0


def token_of_kubernetes(release: Rendered) -> None:
    del pod(release, "kvxfer-router")["automountServiceAccountToken"]


def short_grace(release: Rendered) -> None:
    pod(release, "kvxfer-decode")["terminationGracePeriodSeconds"] = 60


def abrupt_stop(release: Rendered) -> None:
    del container(release, "kvxfer-router")["lifecycle"]


def gap(release: Rendered) -> None:
    release.one("Deployment", "kvxfer")["spec"]["strategy"] = {"type": "Recreate"}


def invalid_policy(release: Rendered) -> None:
    data = release.one("ConfigMap", "kvxfer-policies")["data"]
    data["scaling.yaml"] = data["scaling.yaml"].replace("tokens_per_second", "tokens")


def closed_network(release: Rendered) -> None:
    release.one("NetworkPolicy", "kvxfer-workers")["spec"]["ingress"].pop(0)


def alert_on_nothing(release: Rendered) -> None:
    rules = release.one("PrometheusRule", "kvxfer")["spec"]["groups"][0]["rules"]
    rules[0]["expr"] = "rate(kvxfer_engine_lost_total[5m]) + kvxfer_nothing > 0"


DEFECTS: list[tuple[str, Callable[[Rendered], Any], str]] = [
    ("commands", renamed_flag, "No such option: --cluster-secret"),
    ("commands", wrong_type, "--attempts=many`: "),
    ("commands", renamed_variable, "nothing reads KVXFER_TOKENFILE"),
    ("commands", unknown_variable, "no value for the variables of ['--label=rack=$(RACK)']"),
    ("commands", renamed_drain, "No such option: --till"),
    ("commands", without_instance, "instance_id"),
    ("schemas", wrong_field, "'restartpolicy' was unexpected"),
    ("selectors", wrong_port, "goes to ports {'web'}"),
    ("selectors", wrong_selector, "Service kvxfer selects []"),
    ("names", duplicate_service, "Service kvxfer exists 2 times"),
    ("references", no_such_secret, "there is no Secret elsewhere"),
    ("references", file_that_is_not_mounted, "nothing is mounted at /etc/kvxfer/secret/tokens"),
    ("references", other_port, "http://kvxfer:8081 is not Service kvxfer"),
    ("probes", no_such_route, "/health of its readinessProbe is not a route"),
    ("probes", other_scheme, "its livenessProbe uses another port or scheme"),
    ("rights", extra_verb, "'patch'"),
    ("rights", missing_name, "the role allows"),
    ("rights", root, "Deployment kvxfer-router is root"),
    ("rights", token_of_kubernetes, "has a Kubernetes token that it does not use"),
    ("endings", short_grace, "takes 125.0 s to stop and is given 60"),
    ("endings", abrupt_stop, "kvxfer-router is stopped while requests still come"),
    ("endings", gap, "Deployment kvxfer is replaced by"),
    ("policies", invalid_policy, "decode.tokens is not known"),
    ("network", closed_network, "['prefill'] cannot reach kvxfer-decode"),
    ("metrics", alert_on_nothing, "there is no metric kvxfer_nothing"),
]


@pytest.mark.parametrize(
    ("check", "break_it", "found"), DEFECTS, ids=[defect.__name__ for _, defect, _ in DEFECTS]
)
def test_defect_is_found(check: str, break_it: Callable[[Rendered], Any], found: str) -> None:
    release = render(value_set(FULL), name="broken")
    broken = Rendered(release.name, release.values, copy.deepcopy(release.objects), release.notes)
    break_it(broken)
    said = list(CHECKS[check](broken))
    assert any(found in problem for problem in said), said


def test_every_check_has_a_defect() -> None:
    assert {check for check, _, _ in DEFECTS} == set(CHECKS)
