"""Pairs serve one version of the weights, and the one that a request demands."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from kvxfer.errors import NoCapacity
from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.model_identity import ModelIdentity
from kvxfer.scheduler.pair_index import PairIndex, choose_pair
from kvxfer.transfers import TransferRequest
from verify.processes.control_plane import worker

from .test_pairing import chosen, instance


def at(instance_id: str, role: str, version: int | None, *, epoch: int = 1) -> Instance:
    identity = None if version is None else ModelIdentity(checkpoint="c", weights_version=version)
    return replace(instance(instance_id, role, identity=identity), epoch=epoch)


def reasons(fleet: list[Instance], **request: object) -> list[object]:
    with pytest.raises(NoCapacity) as refusal:
        choose_pair(fleet, TransferRequest(**request))
    found = refusal.value.details["reasons"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("fleet", "request_", "expected"),
    [
        ([("p6", 6), ("p7", 7), ("d7", 7)], {}, ("p7", "d7")),
        ([("p6", 6), ("d6", 6), ("p7", 7), ("d7", 7)], {"weights_version": 7}, ("p7", "d7")),
        ([("p6", 6), ("d6", 6), ("p7", 7), ("d7", 7)], {"weights_version": 6}, ("p6", "d6")),
        ([("p0", 0), ("d0", 0)], {"weights_version": 0}, ("p0", "d0")),
        ([("p", None), ("d7", 7)], {}, ("p", "d7")),
    ],
)
def test_both_of_a_pair_serve_one_version_and_the_requested_one(fleet, request_, expected):
    roles = {"p": "prefill", "d": "decode"}
    live = [at(name, roles[name[0]], version) for name, version in fleet]
    assert chosen(live, **request_) == expected


def test_versions_that_differ_are_named():
    (reason,) = reasons([at("p", "prefill", 6), at("d", "decode", 7)])
    assert "weights_version is 6 and 7" in reason


def test_a_version_that_no_instance_serves_is_refused_with_the_served_ones():
    versions = {"p": 6, "d": 6, "e": 7, "q": None}
    fleet = [at(name, "prefill" if name == "p" else "decode", v) for name, v in versions.items()]
    model = fleet[0].model
    (reason,) = reasons(fleet, weights_version=9, model=model)
    assert reason == (
        f"no instance of model {model!r} serves weights version 9; there are 6 (2), 7 (1), not "
        "told (1)"
    )
    (reason,) = reasons(fleet, weights_version=7)
    assert reason == "no prefill instance with weights version 7 is ready (none registered)"


def test_an_index_follows_instances_from_version_to_version():
    """Instances register again with a new epoch, as workers do after an update."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    index = PairIndex()
    served: dict[str, int] = {}
    for epoch in range(1, 300):
        name = draw.choice(["p0", "p1", "d0", "d1"])
        served[name] = served.get(name, 5) + 1 if draw.random() < 0.5 else draw.randint(5, 8)
        role = "prefill" if name[0] == "p" else "decode"
        index.put(at(name, role, served[name], epoch=epoch))
        for version in range(4, 10):
            pair = index.find(TransferRequest(weights_version=version))
            sides = [{n for n, v in served.items() if v == version and n[0] == s} for s in "pd"]
            if pair is None:
                assert not all(sides)
            else:
                assert pair.prefill.instance_id in sides[0]
                assert pair.decode.instance_id in sides[1]
        pair = index.find(TransferRequest())
        both = {v for n, v in served.items() if n[0] == "p"} & {
            v for n, v in served.items() if n[0] == "d"
        }
        assert (pair is not None) == bool(both)
        if pair is not None:
            assert served[pair.prefill.instance_id] == served[pair.decode.instance_id]


async def test_an_instance_that_registers_again_serves_its_new_version(fleet):
    """Registers again as a worker does after an update (`Registration.take_model`)."""

    async def join(name: str, role: Role, version: int) -> None:
        identity = ModelIdentity(checkpoint="c", weights_version=version)
        spec = worker(name, role, identity=identity)
        await fleet.registry.register(spec, state=InstanceState.READY, incarnation=name)

    await join("p", Role.PREFILL, 6)
    await join("d", Role.DECODE, 6)
    assert (await fleet.registry.choose(TransferRequest(weights_version=6))).prefill.serves(None)
    await join("p", Role.PREFILL, 7)
    assert (await fleet.registry.instance("p")).weights_version == 7
    for version in (None, 6, 7):
        with pytest.raises(NoCapacity):
            await fleet.registry.choose(TransferRequest(weights_version=version))
    await join("d", Role.DECODE, 7)
    pair = await fleet.registry.choose(TransferRequest(weights_version=7))
    assert (pair.prefill.instance_id, pair.decode.instance_id) == ("p", "d")
