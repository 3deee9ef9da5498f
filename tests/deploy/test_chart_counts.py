"""The number of workers over upgrades: the autoscaler's, if there is an autoscaler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.deploy.chart import ROOT, Rendered, render, value_set
from tests.deploy.cluster import Cluster, running_cluster

pytestmark = pytest.mark.native

GROUPS = value_set(ROOT / "deploy" / "helm" / "examples" / "leaderworkerset.yaml")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


def counts(release: Rendered, kind: str) -> list[int | None]:
    """Returns the replicas of prefill and decode; None if the release gives none."""
    names = ("kvxfer-prefill", "kvxfer-decode")
    return [release.one(kind, name)["spec"].get("replicas") for name in names]


@pytest.mark.parametrize(
    ("kind", "values"),
    [("Deployment", {}), ("LeaderWorkerSet", GROUPS)],
    ids=["Deployment", "LeaderWorkerSet"],
)
def test_autoscaler_that_is_switched_on_begins_with_the_present_workers(
    cluster: Cluster, kind: str, values: dict[str, Any]
) -> None:
    live = cluster.objects
    off, on = ({**values, "autoscaler": {"enabled": enabled}} for enabled in (False, True))
    before = counts(cluster.upgrade(**off), kind)
    assert None not in before
    assert counts(cluster.upgrade(**on), kind) == before
    # Now the autoscaler decides.
    live[kind, "kvxfer-prefill"]["spec"]["replicas"] = 7
    live[kind, "kvxfer-decode"]["spec"]["replicas"] = 0
    assert counts(cluster.upgrade(**on), kind) == [7, 0]
    assert counts(cluster.upgrade(**off), kind) == before


def test_autoscaler_of_a_new_release_begins_with_the_default_of_kubernetes(
    cluster: Cluster,
) -> None:
    values = {"autoscaler": {"enabled": True}}
    assert counts(render(values), "Deployment") == [None, None]
    assert counts(cluster.upgrade(**values), "Deployment") == [None, None]
