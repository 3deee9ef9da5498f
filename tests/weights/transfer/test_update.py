"""A whole update: from the memory of training ranks to what the instances serve."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvxfer.errors import WeightUpdateAborted
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer.settings import UpdateSettings

from .job import Job, boxes, job, shards, weights

pytestmark = pytest.mark.native


async def push(at: Job, version: int) -> UpdateReport:
    """All training ranks push; the report of the first."""
    whole = weights(version)
    pushed = [sender.push(version, boxes(sender.holdings, whole)) for sender in at.senders]
    reports = await asyncio.gather(*(each.report for each in pushed))
    assert all(report == reports[0] for report in reports)
    assert all(each.read.done() for each in pushed)
    return reports[0]


def assert_serves(at: Job, version: int) -> None:
    for instance in at.instances:
        for rank, serves in zip(instance.ranks, instance.serves, strict=True):
            assert rank.version == version
            wanted = boxes(rank.holdings, weights(version))
            assert serves.keys() == wanted.keys()
            for name, box in wanted.items():
                np.testing.assert_array_equal(serves[name], box)


@pytest.mark.parametrize("digests", [True, False])
async def test_instances_serve_what_the_training_ranks_have(fabric: str, digests: bool) -> None:
    settings = UpdateSettings(digests=digests)
    train = [shards(number, 3) for number in range(3)]
    infer = [[shards(rank, 2, 1) for rank in range(2)], [shards(0, 1)]]
    async with job(fabric, train=train, infer=infer, settings=settings) as at:
        for version in (1, 2, 7):
            report = await push(at, version)
            assert report.state == "committed"
            assert [(each.instance_id, each.state, each.version) for each in report.instances] == [
                ("i0", "committed", version),
                ("i1", "committed", version),
            ]
            assert [each.pause_seconds for each in report.instances] == [0.25, 0.25]
            assert_serves(at, version)
            told = [each.digest for each in report.instances]
            served = [
                sum(int(rank.digest or "0", 16) for rank in instance.ranks) % (1 << 64)
                for instance in at.instances
            ]
            assert told == ([f"{each:016x}" for each in served] if digests else [None, None])


async def test_a_version_that_is_not_greater_is_refused(fabric: str) -> None:
    async with job(fabric, train=[shards(0, 1)], infer=[[shards(0, 1)]]) as at:
        await push(at, 5)
        with pytest.raises(WeightUpdateAborted, match="version 5 is pushed, and 5 is served"):
            await push(at, 5)
        assert_serves(at, 5)
        await push(at, 6)
        assert_serves(at, 6)
