"""The token ids of prompts, by a worker's own tokenizer and chat template.

A prefill worker renders a chat once (`/v1/chat/completions/render` of vLLM with
`--enable-scale-out`), and both workers get the tokens. If each rendered it, a template that has the
time in it, or another version of it, would make two prompts. If no worker renders, each of the two
does.

The tokens also say where a prompt's beginning is cached, and how many blocks it needs. A text whose
tokens would take too long is paired by load, with a length estimated from earlier texts of its
model.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple

import httpx2
import msgspec

from kvxfer.clock import Clock
from kvxfer.prefix_hashes import TOKENS_PER_HASH, AskedHashes, asked_hashes
from kvxfer.router.asked import Asked
from kvxfer.router.bodies import as_raw
from kvxfer.router.connections import WorkerConnections
from kvxfer.router.metrics import Metrics
from kvxfer.router.models import FleetModels
from kvxfer.router.settings import RouterSettings
from kvxfer.transfers import OpenedTransfer

# A body of fewer bytes has no whole hash of tokens.
_LEAST_BYTES: Final = TOKENS_PER_HASH
_MOST_PROMPTS: Final = 1024
_MOST_MODELS: Final = 1024
_MOST_UNDER_WAY: Final = 64
# The answer of a worker that takes longer is not used.
_GIVE_UP_SECONDS: Final = 10.0
# No worker is asked about a model this long after one could not answer.
_PAUSE_SECONDS: Final = 10.0
# The estimate for the first text of a model.
_BYTES_PER_TOKEN: Final = 4.0
# Answers of a worker that does not render: vLLM's without --enable-scale-out is 403.
_NOT_THERE: Final = frozenset({403, 404, 405, 501})
# Only the places of images in the prompt are wanted.
_NO_PAYLOAD: Final = {"mm_payload": as_raw("none")}

# Among _MOST_TORN tokens, at least one has text. _BEFORE tokens before one are enough to decode it.
_MOST_TORN: Final = 32
_BEFORE: Final = 12
_REPLACEMENT: Final = "\ufffd"

_Tokens = list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


class _Tokenized(msgspec.Struct):
    tokens: _Tokens


class _Detokenized(msgspec.Struct):
    prompt: str


class _RenderedPrompt(msgspec.Struct):
    token_ids: msgspec.Raw
    features: Any = None
    """The features of images and the like, which tokens do not describe."""


class _Prompt(NamedTuple):
    tokens: int
    prefix: AskedHashes


@dataclass(slots=True)
class _Texts:
    """The texts of a model that workers have tokenized."""

    nbytes: int = 0
    tokens: int = 0


class Rendering:
    """The tokens of one router's prompts, as far as they are known. Loop only; close() it."""

    def __init__(
        self,
        http: WorkerConnections,
        models: FleetModels,
        settings: RouterSettings,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._http = http
        self._models = models
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._workers: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._texts: dict[str, _Texts] = {}
        self._pauses: dict[tuple[str, str], float] = {}  # by route and model: until when
        self._known: collections.OrderedDict[bytes, _Prompt] = collections.OrderedDict()
        self._asked: dict[bytes, asyncio.Task[_Prompt | None]] = {}

    async def close(self) -> None:
        asked = list(self._asked.values())
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    def served(self, model: str, transfer: OpenedTransfer) -> None:
        """Notes a prefill worker that has the model: it is asked next."""
        self._workers[model] = transfer.prefill.http_address
        self._workers.move_to_end(model)
        if len(self._workers) > _MOST_MODELS:
            gone, _ = self._workers.popitem(last=False)
            self._texts.pop(gone, None)

    async def prepared(self, asked: Asked) -> Asked:
        """Returns the request with its prompt rendered, or its tokens counted or estimated."""
        model = asked.model
        if asked.ids is not None:
            return replace(asked, prefix=asked_hashes(asked.ids, model or ""))
        if not asked.alone and model is not None:
            content = self._text(asked)
            useful = len(content) >= _LEAST_BYTES or asked.dialect.renders(asked.members)
            if useful and (worker := await self._worker(model)):
                rendered = await self.rendered(asked, worker)
                if rendered.rendered is not None:
                    return rendered
                if (prompt := await self._counted(asked, model, worker, content)) is not None:
                    return replace(asked, prompt_tokens=prompt.tokens or None, prefix=prompt.prefix)
        texts = self._texts.get(model or "")
        per_token = _BYTES_PER_TOKEN if texts is None else texts.nbytes / texts.tokens
        estimate = math.ceil(asked.text_bytes / per_token)
        return replace(asked, prompt_tokens=(asked.prompt_tokens or 0) + estimate or None)

    async def _worker(self, model: str) -> str | None:
        """Returns a prefill worker that has the model, if one is found within the time for a
        tokenizer."""
        if (known := self._workers.get(model)) is not None:
            return known
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.tokenize_seconds):
                return await self._models.prefill_worker(model)
        return None

    async def rendered(self, asked: Asked, worker: str) -> Asked:
        """Returns the request with its prompt as this worker renders it, if it does. Workers refuse
        a prompt that cannot be rendered, in their own words."""
        seconds, dialect = self._settings.render_seconds, asked.dialect
        model = asked.model or ""
        if not (
            seconds > 0
            and asked.rendered is None
            and not asked.alone
            and self._may_ask("render", model)
            and dialect.renders(asked.members)
        ):
            return asked
        body = msgspec.json.encode({**asked.members, **_NO_PAYLOAD})
        outcome = "failed"
        try:
            async with asyncio.timeout(seconds):
                answer = await self._post(worker + dialect.path + "/render", body, asked.headers)
            if answer.status_code in _NOT_THERE:
                self._pause("render", model)
                return asked
            if answer.is_success:
                prompt = msgspec.json.decode(answer.content, type=_RenderedPrompt)
                ids = msgspec.json.decode(prompt.token_ids, type=_Tokens)
                if prompt.features is None:
                    outcome = "rendered"
                    return replace(
                        asked,
                        rendered=prompt.token_ids,
                        prompt_tokens=len(ids) or None,
                        prefix=asked_hashes(ids, model),
                    )
        except TimeoutError:
            self._pause("render", model)
            outcome = "late"
        except (httpx2.HTTPError, msgspec.DecodeError):
            self._pause("render", model)
        finally:
            self._count(outcome)
        return asked

    async def torn(self, tokens: list[int], model: str | None, worker: str) -> int | None:
        """Returns how many of the last tokens begin a character whose end is missing; None if the
        worker does not say."""
        for torn in range(min(_MOST_TORN, len(tokens) + 1)):
            last = tokens[max(len(tokens) - torn - _BEFORE, 0) : len(tokens) - torn]
            body = msgspec.json.encode({"model": model, "tokens": last})
            try:
                async with asyncio.timeout(_GIVE_UP_SECONDS):
                    answer = await self._post(worker + "/detokenize", body)
                answer.raise_for_status()
                text = msgspec.json.decode(answer.content, type=_Detokenized).prompt
            except (httpx2.HTTPError, msgspec.DecodeError, TimeoutError):
                return None
            if not text.endswith(_REPLACEMENT):
                return torn
        return None

    def _text(self, asked: Asked) -> bytes:
        """Returns the request to a tokenizer; empty if it does not know all of the prompt."""
        dialect = asked.dialect
        if not (dialect.tokenized and dialect.is_text(asked.members)):
            return b""
        members = {k: v for k, v in asked.members.items() if k in dialect.tokenized}
        return msgspec.json.encode(members)

    async def _counted(
        self, asked: Asked, model: str, worker: str, content: bytes
    ) -> _Prompt | None:
        if len(content) < _LEAST_BYTES:
            return None
        key = hashlib.blake2b(content, digest_size=16).digest()
        if (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            self._count("cached")
            return known
        if (asking := self._asked.get(key)) is None:
            most = len(self._asked) >= _MOST_UNDER_WAY
            if self._settings.tokenize_seconds <= 0 or most or not self._may_ask("tokenize", model):
                return None
            asking = asyncio.create_task(self._tokenize(key, asked, model, worker, content))
            self._asked[key] = asking
            asking.add_done_callback(lambda _: self._asked.pop(key, None))
        # The task goes on if the request stops waiting: the next request like it finds the answer.
        done, _ = await asyncio.wait([asking], timeout=self._settings.tokenize_seconds)
        if not done:
            self._count("late")
            return None
        return asking.result()

    async def _tokenize(
        self, key: bytes, asked: Asked, model: str, worker: str, content: bytes
    ) -> _Prompt | None:
        try:
            async with asyncio.timeout(_GIVE_UP_SECONDS):
                answer = await self._post(worker + "/tokenize", content)
            if answer.is_client_error and answer.status_code not in _NOT_THERE:
                self._count("failed")  # the worker that gets the request says why
                return None
            answer.raise_for_status()
            tokens = msgspec.json.decode(answer.content, type=_Tokenized).tokens
            prompt = _Prompt(len(tokens), asked_hashes(tokens, model))
        except (httpx2.HTTPError, msgspec.DecodeError, TimeoutError):
            self._pause("tokenize", model)
            self._count("failed")
            return None
        self._count("asked")
        self._known[key] = prompt
        # A chat also has tokens of its template and tools.
        if prompt.tokens and not asked.dialect.renders(asked.members):
            texts = self._texts.setdefault(model, _Texts())
            if len(self._texts) > _MOST_MODELS:
                del self._texts[next(iter(self._texts))]
            texts.nbytes += asked.text_bytes
            texts.tokens += prompt.tokens
        if len(self._known) > _MOST_PROMPTS:
            self._known.popitem(last=False)
        return prompt

    async def _post(
        self, url: str, content: bytes, headers: Mapping[str, str] | None = None
    ) -> httpx2.Response:
        own = {"Content-Type": "application/json", **self._settings.headers_for_workers()}
        headers = {**(headers or {}), **own}
        answer = await self._http.send("POST", url, headers, content)
        try:
            # vLLM closes the connection after an internal error. An unread answer closes it here
            # too, so that the request itself does not meet a closed connection.
            if not answer.is_server_error:
                await answer.aread()
        finally:
            await answer.aclose()
        return answer

    def _may_ask(self, route: str, model: str) -> bool:
        return self._pauses.get((route, model), 0.0) <= self._clock.monotonic()

    def _pause(self, route: str, model: str) -> None:
        now = self._clock.monotonic()
        self._pauses = {key: until for key, until in self._pauses.items() if until > now}
        self._pauses[route, model] = now + _PAUSE_SECONDS

    def _count(self, outcome: str) -> None:
        self._metrics.tokenized.labels(outcome).inc()
