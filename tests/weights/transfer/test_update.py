"""A whole update, from the memory of training ranks to what the instances serve."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest
import torch

from kvxfer.errors import InvalidArgument, OldVersion, WeightsMismatch
from kvxfer.weights.holdings import Holding, Holdings
from kvxfer.weights.report import UpdateReport
from kvxfer.weights.transfer.registrar import Announced, NoRegistrar
from kvxfer.weights.transfer.settings import UpdateSettings
from verify.polling import eventually

from .job import Job, boxes, job, shards, weights

pytestmark = pytest.mark.native


async def push(at: Job, version: int) -> UpdateReport:
    """Pushes a version from all training ranks; returns their report."""
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
        with pytest.raises(
            WeightsMismatch, match="version 5 is pushed, and 5 is served"
        ) as refused:
            await push(at, 5)
        report = refused.value.report
        assert isinstance(report, UpdateReport)
        assert (report.version, report.state, report.code) == (5, "aborted", "weights-mismatch")
        assert report.update_id.startswith("5-")
        assert [(each.instance_id, each.version) for each in report.instances] == [("i0", 5)]
        assert_serves(at, 5)
        await push(at, 6)
        assert_serves(at, 6)


async def test_a_version_that_the_control_plane_refuses_is_refused_as_such(fabric: str) -> None:
    class Refusing(NoRegistrar):
        @contextlib.asynccontextmanager
        async def announce(self, *_: object) -> AsyncIterator[Announced]:
            raise OldVersion("i0 serves version 9")
            yield self

    async with job(
        fabric, train=[shards(0, 1)], infer=[[shards(0, 1)]], registrar=Refusing()
    ) as at:
        with pytest.raises(WeightsMismatch, match="i0 serves version 9") as refused:
            await push(at, 5)
        assert isinstance(refused.value.report, UpdateReport)
        assert refused.value.report.code == "old-version"


async def test_parameters_that_do_not_fit_are_refused_as_such(fabric: str) -> None:
    half = [
        Holding(each.name, "bfloat16", each.whole, each.offset, each.shape)
        for each in shards(0, 1).parameters
    ]
    async with job(fabric, train=[shards(0, 1)], infer=[[Holdings(tuple(half))]]) as at:
        for _ in range(2):
            with pytest.raises(WeightsMismatch, match="float32 at training and bfloat16 at") as why:
                await push(at, 3)
            assert isinstance(why.value.report, UpdateReport)
            assert why.value.report.version == 3
            assert why.value.report.update_id.startswith("3-")


async def test_scales_without_a_home_are_refused_before_a_byte_is_sent(fabric: str) -> None:
    """The trainer quantises a parameter that the instance keeps unquantised, and the reverse."""
    wide = Holding("gate.weight", "bfloat16", (4, 8), (0, 0), (4, 8))
    narrow = Holding("gate.weight", "float8_e4m3fn", (4, 8), (0, 0), (4, 8))
    scale = Holding("gate.weight_scale_inv", "float32", (1, 1), (0, 0), (1, 1))
    kinds = [Holdings((narrow, scale)), Holdings((wide,))]
    for train, infer in (kinds, kinds[::-1]):
        tensors = {each.name: np.zeros(each.nbytes, np.uint8) for each in train.parameters}
        async with job(fabric, train=[train], infer=[[infer]]) as at:
            pushed = at.senders[0].push(1, tensors)
            with pytest.raises(WeightsMismatch, match=r"gate\.weight"):
                await pushed.report
            assert at.instances[0].commits == 0


async def test_a_rank_that_cannot_push_ends_the_pushes_of_the_others(fabric: str) -> None:
    train = [shards(number, 3) for number in range(3)]
    async with job(fabric, train=train, infer=[[shards(0, 1)]]) as at:
        whole = weights(1)
        pushed = [each.push(1, boxes(each.holdings, whole)) for each in at.senders[:2]]
        with pytest.raises(InvalidArgument, match="norm is missing"):
            at.senders[2].push(1, {"embed": whole["embed"][64:]})
        for each in pushed:
            with pytest.raises(
                WeightsMismatch, match="training rank 2 cannot send it: norm is missing"
            ):
                await each.report
        # The same version is pushed once all can.
        await push(at, 1)
        assert_serves(at, 1)


async def test_a_rank_that_cannot_push_stays_the_reason_after_it_ends(fabric: str) -> None:
    train = [shards(number, 2) for number in range(2)]
    async with job(fabric, train=train, infer=[[shards(0, 1)]]) as at:
        at.senders[1].refuse(1, WeightsMismatch("up.weight was 1, and is 2"))
        await eventually(lambda: bool(at.coordinator._readiness._refusals()))
        await at.engines[-1].close()
        await eventually(lambda: at.coordinator._members.missing_trainers() == [1])
        pushed = at.senders[0].push(1, boxes(at.senders[0].holdings, weights(1)))
        with pytest.raises(WeightsMismatch, match=r"training rank 1 cannot send it: up\.weight"):
            await pushed.report


async def test_tensors_of_another_kind_at_the_same_address_are_refused(fabric: str) -> None:
    async with job(fabric, train=[shards(0, 1)], infer=[[shards(0, 1)]]) as at:
        [sender] = at.senders
        tensors = {
            name: torch.from_numpy(each)
            for name, each in boxes(sender.holdings, weights(1)).items()
        }
        await sender.push(1, tensors).report
        embed = tensors["embed"]
        for other, text in {
            embed.view(torch.int32): r"embed is int32 of \[96, 40\]",
            embed.view(40, 96): r"embed is float32 of \[40, 96\]",
            embed.view(40, 96).t(): "embed is not contiguous",
        }.items():
            with pytest.raises(InvalidArgument, match=text):
                sender.push(2, {**tensors, "embed": other})
        await sender.push(2, tensors).report
