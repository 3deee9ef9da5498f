"""An example of each error that a route can answer with, made by the code that refuses."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

import msgspec
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from kvxfer.api import refusals as api_refusals
from kvxfer.api.trace_store import TraceStore
from kvxfer.errors import BodyTooLarge, InvalidArgument, KvxferError, LayoutMismatch
from kvxfer.instances import Instance
from kvxfer.record import Record
from kvxfer.record_schema import example
from kvxfer.scheduler import refusals
from kvxfer.scheduler.checked_scorer import CheckedScorer
from kvxfer.scheduler.scaling.kubernetes import refused
from kvxfer.scheduler.scoring import WeightedScorer
from kvxfer.ticket import Ticket, TicketKeys, sign_ticket, verify_ticket
from kvxfer.transfers import Transfer, TransferRequest
from kvxfer.web.body_limit import too_large
from kvxfer.web.tokens import Caller, Scope
from kvxfer.weight_updates import Decision, UpdatePart, WeightUpdate

R = TypeVar("R", bound=Record)

_EPOCH: Final = 1795046400000001
_NOW: Final = 1795046460.0
_KEYS: Final = TicketKeys([bytes(16)])


class Fewest(WeightedScorer):
    """Another package's scorer, with a defect."""

    def pair(self, _distance: int, _fabric_steps: int, _prefix_tokens: int) -> float:
        return math.nan


def _made(record: type[R]) -> R:
    return msgspec.convert(example(record), record)


def _raised(refuse: Callable[[], object]) -> KvxferError:
    try:
        refuse()
    except KvxferError as error:
        return error
    raise AssertionError("nothing was refused")


def _invalid() -> InvalidArgument:
    """Returns the error of a registration without KV blocks."""
    found = ValidationError.from_exception_data(
        "InstanceSpec",
        [
            {
                "type": "greater_than_equal",
                "loc": ("body", "num_blocks"),
                "input": 0,
                "ctx": {"ge": 1},
            }
        ],
    )
    return api_refusals.invalid(RequestValidationError(found.errors()))


_DECODE: Final = msgspec.structs.replace(_made(Instance), instance_id="decode-0")
_TRANSFER: Final = _made(Transfer)
_UPDATE: Final = _made(WeightUpdate)
_TICKET: Final = Ticket(
    transfer_id=_TRANSFER.transfer_id,
    request_id=_TRANSFER.request_id,
    prefill_id="prefill-0",
    prefill_epoch=_EPOCH,
    decode_id="decode-0",
    decode_epoch=_EPOCH,
    expires_at=_NOW,
)

EXAMPLES: Final[Mapping[type[KvxferError], KvxferError]] = {
    type(error): error
    for error in (
        _invalid(),
        LayoutMismatch("head_size", 128, 64),
        refusals.prompt_too_long(
            TransferRequest(prompt_tokens=90_000), 5_625, "decode instance", _DECODE
        ),
        refusals.held(
            "prefill-0",
            "http://10.0.0.5:8000",
            _EPOCH,
            4.2,
            registering="http://10.0.0.6:8000",
        ),
        refusals.leaving("prefill-0"),
        refusals.stale_epoch("prefill-0", _EPOCH, None),
        refusals.unknown_instance("prefill-0"),
        refusals.unknown_transfer(_TRANSFER.transfer_id),
        refusals.transfer_exists(_TRANSFER),
        refusals.unknown_block_table(_TRANSFER.transfer_id),
        refusals.block_table_exists(_TRANSFER.transfer_id),
        refusals.unknown_update(_UPDATE.update_id),
        refusals.update_under_way(_UPDATE),
        refusals.update_decided(
            msgspec.structs.replace(_UPDATE, decision=Decision.ABORT), "committed"
        ),
        refusals.old_version(_UPDATE.model, 6, _made(UpdatePart)),
        refusals.no_pair(["no decode instance of model 'llama-3.2-3b' is ready (1 draining)"]),
        refusals.not_aggregating(" of model 'llama-3.2-3b'"),
        refusals.stopping(),
        api_refusals.unknown_token(),
        api_refusals.wrong_scope(
            "POST",
            "/v1/transfers",
            [Scope.ROUTER],
            Caller("node-5", frozenset({Scope.WORKER})),
        ),
        api_refusals.too_many_requests("'router-1' at 10.0.0.9", 0.012),
        api_refusals.block_table_of_another("5b1c", _TRANSFER.transfer_id),
        api_refusals.takes_no_traces(),
        BodyTooLarge(too_large(1 << 20).detail),
        refused("read", "deployments.apps llm/prefill", 403, "Forbidden"),
        _raised(lambda: TraceStore().find("chat-7f3a")),
        _raised(lambda: CheckedScorer(Fewest()).pair(4, 0, 0)),
        _raised(
            lambda: _KEYS.find("another", f"the block table of transfer {_TRANSFER.transfer_id}")
        ),
        _raised(lambda: verify_ticket(sign_ticket(_TICKET, _KEYS), _KEYS, now=_NOW + 30.4)),
    )
}
