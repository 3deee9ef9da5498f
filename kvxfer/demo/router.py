"""The router of the demo: one attempt per prompt, and the answers of both workers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from kvxfer.client import ControlPlaneClient, Credentials
from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.errors import KvxferError
from kvxfer.reference.worker.completions import DecodeCompletion, PrefillCompletion
from kvxfer.router.asked import read_request
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.dialects import COMPLETIONS
from kvxfer.router.exchange import Exchange, WorkerFailed
from kvxfer.router.settings import RouterSettings
from kvxfer.transfers import OpenedTransfer


@dataclass(frozen=True, slots=True)
class Routed:
    """Both answers to one prompt."""

    prefill: PrefillCompletion
    decode: DecodeCompletion
    pairing_seconds: float
    """The time to get a pair and a ticket from the control plane."""


class Router:
    """A router of completions over one control plane. Loop only; use it inside `async with`.

    `transport` carries the requests to the control plane and to workers; the default is TCP.
    """

    def __init__(
        self,
        control_plane: str,
        *,
        credentials: Credentials | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._control_plane = ControlPlaneClient(
            control_plane, credentials=credentials, transport=transport
        )
        self._http = WorkerConnections(transport)
        self._settings = RouterSettings()

    async def __aenter__(self) -> Router:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._control_plane.close()

    async def complete(self, tokens: Sequence[int], *, model: str, max_tokens: int) -> Routed:
        """Gets one completion of exactly `max_tokens` tokens.

        Raises the error that the control plane or a worker answers, PeerLost if a worker does not.
        """
        started = self._clock.monotonic()
        transfer = await self._control_plane.open_transfer(model=model, prompt_tokens=len(tokens))
        paired = self._clock.monotonic() - started
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "ignore_eos": True,
        }
        try:
            # The transfer's lease bounds the time.
            asked = read_request(
                COMPLETIONS, json.dumps(body).encode(), request_id=transfer.request_id
            )
            async with Exchange(self._http, transfer, asked, self._settings) as exchange:
                await exchange.begin()
                prefill, decode = await exchange.answers()
        except WorkerFailed as failure:
            raise failure.error from failure
        finally:
            await self._release(transfer)
        return Routed(
            PrefillCompletion.model_validate_json(prefill),
            DecodeCompletion.model_validate_json(decode),
            paired,
        )

    async def _release(self, transfer: OpenedTransfer) -> None:
        # A reservation that cannot be given back ends with its ticket.
        with contextlib.suppress(KvxferError):
            await self._control_plane.release_transfer(transfer.transfer_id)
