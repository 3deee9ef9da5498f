"""The router of the demo: asks the control plane for a pair, sends both workers the request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import msgspec
from pydantic import BaseModel

from kvxfer.client import ControlPlaneClient, Credentials
from kvxfer.errors import (
    KvxferError,
    LayoutMismatch,
    PeerLost,
    TransferCancelled,
    TransferError,
    by_code,
)
from kvxfer.reference.worker.completions import DecodeCompletion, PrefillCompletion
from kvxfer.transfers import OpenedTransfer

A = TypeVar("A", bound=BaseModel)
P = TypeVar("P")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Routed:
    """Both answers to one prompt."""

    prefill: PrefillCompletion
    decode: DecodeCompletion
    pairing_seconds: float
    """Getting a pair and a ticket from the control plane."""


class Router:
    """Routes completions over one control plane. Loop only; use it inside `async with`.

    `transport` carries the requests, to the control plane and to workers; TCP without it.
    """

    def __init__(
        self,
        control_plane: str,
        *,
        credentials: Credentials | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._control_plane = ControlPlaneClient(
            control_plane, credentials=credentials, transport=transport
        )
        # Workers answer when a request is done; the transfer's lease bounds how long that takes.
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(5.0, read=None), transport=transport, trust_env=False
        )

    async def __aenter__(self) -> Router:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._control_plane.close()

    async def complete(self, tokens: Sequence[int], *, model: str, max_tokens: int) -> Routed:
        """One completion of exactly `max_tokens` tokens.

        Raises what the control plane or a worker answers, PeerLost where a worker does not.
        """
        started = time.perf_counter()
        transfer = await self._control_plane.open_transfer(model=model, prompt_tokens=len(tokens))
        paired = time.perf_counter() - started
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "kv_transfer_params": {
                "ticket": transfer.ticket,
                "prefill_engine_address": transfer.prefill.engine_address,
            },
        }
        try:
            prefill, decode = await _both(
                self._ask(transfer.prefill.http_address, body, PrefillCompletion),
                self._ask(transfer.decode.http_address, body, DecodeCompletion),
            )
        finally:
            await self._release(transfer)
        return Routed(prefill, decode, paired)

    async def _ask(self, address: str, body: dict[str, Any], answer: type[A]) -> A:
        try:
            response = await self._http.post(f"{address}/v1/completions", json=body)
        except httpx.RequestError as error:
            cause = str(error) or type(error).__name__
            raise PeerLost(f"the worker at {address} does not answer ({cause})") from error
        if not response.is_success:
            raise _error(address, response)
        return answer.model_validate_json(response.content)

    async def _release(self, transfer: OpenedTransfer) -> None:
        # A reservation that cannot be given back ends with its ticket.
        with contextlib.suppress(KvxferError):
            await self._control_plane.release_transfer(transfer.transfer_id)


async def _both(prefill: Coroutine[Any, Any, P], decode: Coroutine[Any, Any, D]) -> tuple[P, D]:
    """Both results. As soon as one side fails the request of the other is given up, and with it
    all that it holds. What is raised is the cause rather than how the other side took it."""
    prefilling, decoding = asyncio.create_task(prefill), asyncio.create_task(decode)
    tasks: tuple[asyncio.Task[Any], ...] = (prefilling, decoding)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        errors = [error for task in tasks if task.done() and (error := task.exception())]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, TransferCancelled))
        return prefilling.result(), decoding.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error(address: str, response: httpx.Response) -> KvxferError:
    """The error that a worker's problem document names."""
    try:
        problem = msgspec.json.decode(response.content, type=dict[str, Any])
        code, detail = str(problem["code"]), str(problem["detail"])
    except (msgspec.DecodeError, KeyError):
        return TransferError(
            f"the worker at {address} answered HTTP {response.status_code} without a problem "
            "document"
        )
    kind = by_code(code)
    if kind is KvxferError or kind is LayoutMismatch:
        return TransferError(f"{detail} [{code}]")
    return kind(detail)
