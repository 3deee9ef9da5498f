"""The answers of the scripts in Redis: a lease, or why a step is refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvxfer.errors import ControlPlaneError
from kvxfer.instances import InstanceState, Lease, Reserved, Role
from kvxfer.scheduler import refusals
from kvxfer.scheduler.lease_policy import LeasePolicy
from kvxfer.scheduler.redis_registry.records import reading
from kvxfer.scheduler.redis_registry.scripts import Step


def accepted(step: Step, answer: object, arguments: Sequence[str | bytes]) -> list[bytes]:
    """Returns the result of a step that was taken. Raises the refusal of any other, and
    ControlPlaneUnavailable for an answer that comes from damaged records."""
    with reading(f"what the step {step!r} found"):
        said, *rest = msgspec.convert(answer, list[bytes])
        if said == b"ok":
            return rest
        refused = _refusal(said.decode(), [part.decode() for part in rest], arguments)
    raise refused


def lease(instance_id: str, policy: LeasePolicy, said: Sequence[bytes]) -> Lease:
    with reading(f"the lease of instance {instance_id!r}"):
        epoch, state, role, transfers, blocks, left = (part.decode() for part in said)
        return Lease(
            instance_id=instance_id,
            epoch=int(epoch),
            state=InstanceState(state),
            lease_seconds=policy.lease_seconds,
            heartbeat_interval=policy.heartbeat_interval,
            role=Role(role),
            reserved=Reserved(transfers=int(transfers), blocks=int(blocks)),
            drain_seconds=int(left) / 1e6 if left else None,
        )


def _refusal(said: str, about: list[str], arguments: Sequence[str | bytes]) -> ControlPlaneError:
    match said, about:
        case "held", [http_address, epoch, micros]:
            return refusals.held(
                *(str(arguments[0]), http_address, int(epoch), int(micros) / 1e6),
                registering=str(arguments[4]),
            )
        case "stale", [name, epoch, living]:
            return refusals.stale_epoch(name, int(epoch), int(living) if living else None)
        case "wrong-secret", [name, shown]:
            return refusals.wrong_secret(name, shown)
        case "leaving", [name]:
            return refusals.leaving(name)
        case "not-ready", [name, state]:
            return refusals.not_ready(name, state)
        case "too-few-blocks", [name, unreserved, wanted]:
            return refusals.too_few_blocks(name, int(unreserved), int(wanted))
        case "unknown-instance", []:
            return refusals.unknown_instance(str(arguments[0]))
        case "table-exists", []:
            return refusals.block_table_exists(str(arguments[0]))
        case "unknown-transfer", []:
            return refusals.unknown_transfer(str(arguments[0]))
    raise ValueError(f"a script answered {said!r} with {about!r}")
