"""The token ids of text prompts and of chats, by a worker's own tokenizer and chat template.

They tell where a prompt's beginning is cached, and how many blocks it needs. Neither has to be
known: a request that would wait longer for them goes by load, with an estimate of its length.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

import httpx2
import msgspec

from kvxfer.clock import Clock
from kvxfer.prefix_hashes import TOKENS_PER_HASH, AskedHashes, asked_hashes
from kvxfer.router.completion import CompletionRequest
from kvxfer.router.metrics import Metrics
from kvxfer.router.settings import RouterSettings
from kvxfer.transfers import OpenedTransfer

# A body of fewer bytes has no whole hash of tokens.
_LEAST_BYTES: Final = TOKENS_PER_HASH
_MOST_PROMPTS: Final = 1024
_MOST_MODELS: Final = 1024
_MOST_UNDER_WAY: Final = 64
# A worker that answers later than that tells nothing any more.
_GIVE_UP_SECONDS: Final = 10.0
# A model whose worker could not say is left alone for so long.
_PAUSE_SECONDS: Final = 10.0


class _Tokenized(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


class _Prompt(NamedTuple):
    tokens: int
    prefix: AskedHashes


class Tokenizing:
    """What is known of the prompts of one router. Loop only; close() it."""

    def __init__(
        self, http: httpx2.AsyncClient, settings: RouterSettings, metrics: Metrics, clock: Clock
    ) -> None:
        self._http = http
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._workers: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._pauses: dict[str, float] = {}  # by model: until when
        self._known: collections.OrderedDict[bytes, _Prompt] = collections.OrderedDict()
        self._asked: dict[bytes, asyncio.Task[_Prompt | None]] = {}

    async def close(self) -> None:
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    def served(self, model: str, transfer: OpenedTransfer) -> None:
        """A prefill worker that has the model: it is asked next."""
        self._workers[model] = transfer.prefill.http_address
        self._workers.move_to_end(model)
        if len(self._workers) > _MOST_MODELS:
            gone, _ = self._workers.popitem(last=False)
            self._pauses.pop(gone, None)

    async def tokenized(self, request: CompletionRequest) -> CompletionRequest:
        """The request with its tokens counted and hashed, where that is known in time."""
        if request.text is None:
            return request
        content = msgspec.json.encode(request.text)
        if len(content) < _LEAST_BYTES or (prompt := await self._prompt(request, content)) is None:
            return request
        return replace(request, prompt_tokens=prompt.tokens or None, prefix=prompt.prefix)

    async def _prompt(self, request: CompletionRequest, content: bytes) -> _Prompt | None:
        key = hashlib.blake2b(content, digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            self._count("cached")
            return known
        if (asking := self._asked.get(key)) is None:
            if not self._may_ask(request.model):
                return None
            asking = asyncio.create_task(self._ask(key, request, content))
            self._asked[key] = asking
            asking.add_done_callback(lambda _: self._asked.pop(key, None))
        # It goes on where the request does not wait for it: the next one like it finds the answer.
        done, _ = await asyncio.wait([asking], timeout=self._settings.tokenize_seconds)
        if not done:
            self._count("late")
            return None
        return asking.result()

    def _may_ask(self, model: str) -> bool:
        return (
            self._settings.tokenize_seconds > 0
            and model in self._workers
            and len(self._asked) < _MOST_UNDER_WAY
            and self._pauses.get(model, 0.0) <= self._clock.monotonic()
        )

    async def _ask(self, key: bytes, request: CompletionRequest, content: bytes) -> _Prompt | None:
        headers = {"Content-Type": "application/json", **self._settings.headers_for_workers()}
        url = self._workers[request.model] + "/tokenize"
        try:
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                answer = await self._http.post(url, content=content, headers=headers)
            answer.raise_for_status()
            tokens = msgspec.json.decode(answer.content, type=_Tokenized).tokens
            prompt = _Prompt(len(tokens), asked_hashes(tokens, request.model))
        except (httpx2.HTTPError, msgspec.DecodeError, TimeoutError):
            self._pauses[request.model] = self._clock.monotonic() + _PAUSE_SECONDS
            self._count("failed")
            return None
        self._count("asked")
        self._known[key] = prompt
        if len(self._known) > _MOST_PROMPTS:
            self._known.popitem(last=False)
        return prompt

    def _count(self, outcome: str) -> None:
        self._metrics.tokenized.labels(outcome).inc()
