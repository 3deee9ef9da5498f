"""A worker that streams as vLLM 0.32 does, with a made-up model. Text is sent when characters are
complete, as Hugging Face's `tokenizers` decodes them, and stop strings hold text back."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from kvxfer.web.answer import DONE, data_event
from tests.network import Answer, Reply

JsonObject = dict[str, Any]

EVENTS: Final = "text/event-stream; charset=utf-8"
CONTEXT: Final = 512
"""The most tokens of a prompt and its answer."""


def _tokenizer() -> Tokenizer:
    """Makes a tokenizer: each byte is a token, and some words are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *("ab", "END", "Ġthe", "Ġa", "xE")]
    made = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|eos|>"])
    return made


TOKENIZER: Final = _tokenizer()
_EOS: Final[int] = TOKENIZER.token_to_id("<|eos|>")
_PIECES: Final = [
    *([TOKENIZER.token_to_id(piece)] for piece in ("ab", "END", "Ġthe", "Ġa", "xE")),
    *(TOKENIZER.encode(character).ids for character in "abENDx\né€🙂é€🙂"),
    [TOKENIZER.encode("€").ids[0]],  # torn
    [_EOS],
]


def decoded(ids: Sequence[int]) -> str:
    text: str = TOKENIZER.decode(list(ids))
    return text


def prompt_of(body: JsonObject) -> list[int]:
    if "messages" in body:
        said = "".join(f"<{each['role']}>{each['content']}" for each in body["messages"])
        ids: list[int] = TOKENIZER.encode(said + "<assistant>").ids
        return ids
    prompt = body["prompt"]
    return prompt if isinstance(prompt, list) else list(TOKENIZER.encode(prompt).ids)


class Model:
    """A model whose tokens depend on `seed` and on all tokens before them only."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def next(self, ids: Sequence[int]) -> int:
        digest = hashlib.blake2b(repr((self._seed, list(ids))).encode(), digest_size=4).digest()
        chosen = int.from_bytes(digest, "big")
        if chosen % 16:  # otherwise a character stays incomplete
            for piece in _PIECES:
                for begun in range(len(piece) - 1, 0, -1):
                    if list(ids[-begun:]) == piece[:begun]:
                        return piece[begun]
        return _PIECES[chosen // 16 % len(_PIECES)][0]


class Output(NamedTuple):
    ids: list[int]
    text: str
    finish_reason: str | None = None
    stop_reason: str | int | None = None


def generated(model: Model, body: JsonObject) -> Iterator[Output]:
    """Yields outputs of one token each, as vLLM's detokenizer and its search for stop strings
    (v1/engine/detokenizer.py) make them."""
    prompt = prompt_of(body)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    limit = limit or (CONTEXT if "messages" in body else 16)
    limit = min(limit, CONTEXT - len(prompt))
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    included = body.get("include_stop_str_in_output", False)
    behind = 0 if included else max((len(stop) - 1 for stop in stops), default=0)
    least = body.get("min_tokens", 0)
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    ids: list[int] = []
    text, sent = "", 0
    while True:
        token = model.next([*prompt, *ids])
        if token == _EOS and len(ids) < least:
            token = _PIECES[0][0]
        ids.append(token)
        ended = token == _EOS and not body.get("ignore_eos")
        piece = "" if ended else stream.step(TOKENIZER, token) or ""
        text += piece
        found = _stopped(text, len(piece), stops) if len(ids) > least else None
        reason: str | None = None
        stop_reason: str | int | None = None
        if found is not None:
            reason, (stop_reason, at) = "stop", found
            text = text[: at + len(stop_reason) if included else at]
        elif ended:
            reason = "stop"
        elif len(ids) == limit:
            reason = "length"
        until = len(text) if reason else max(len(text) - behind, sent)
        yield Output([token], text[sent:until], reason, stop_reason)
        sent = until
        if reason:
            return


def _stopped(text: str, new: int, stops: Sequence[str]) -> tuple[str, int] | None:
    """Returns the stop string that the new characters complete first, and where it begins."""
    found = [
        (at + len(stop), stop, at)
        for stop in stops
        if new and (at := text.find(stop, max(len(text) - new - len(stop) + 1, 0))) >= 0
    ]
    if not found:
        return None
    _, stop, at = min(found, key=lambda each: each[0])
    return stop, at


def merged(outputs: Iterator[Output], counts: Callable[[int], int]) -> Iterator[Output]:
    """Merges outputs as vLLM does for a slow reader: `counts` gives the number to merge next, from
    the number merged so far."""
    number = 0
    waiting: list[Output] = []
    for output in outputs:
        waiting.append(output)
        if output.finish_reason or len(waiting) >= counts(number):
            yield Output(
                [token for each in waiting for token in each.ids],
                "".join(each.text for each in waiting),
                output.finish_reason,
                output.stop_reason,
            )
            number, waiting = number + len(waiting), []


def events(
    model: Model, body: JsonObject, request_id: str, counts: Callable[[int], int] = lambda _: 1
) -> Iterator[bytes]:
    """Yields the events of an answer, and [DONE]."""
    chat = "messages" in body
    prompt, told = prompt_of(body), 0
    wants_ids = body.get("return_token_ids", False)
    options = body.get("stream_options") or {}
    head = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1000 + len(prompt),
        "model": "llama",
    }

    def event(choice: JsonObject, **more: Any) -> bytes:
        if options.get("continuous_usage_stats"):
            more["usage"] = usage(len(prompt), told)
        return data_event({**head, "choices": [{"index": 0, **choice}], **more})

    if chat:
        role = {"role": "assistant", "content": ""}
        yield event(
            {"delta": role, "logprobs": None, "finish_reason": None},
            prompt_token_ids=prompt if wants_ids else None,
        )
    for output in merged(generated(model, body), counts):
        first, told = not told, told + len(output.ids)
        rest: JsonObject = {"logprobs": None, "finish_reason": output.finish_reason}
        ids = output.ids if wants_ids else None
        if chat:
            if output.finish_reason:
                rest["stop_reason"] = output.stop_reason
            yield event({"delta": {"content": output.text}, **rest, "token_ids": ids})
        else:
            rest["stop_reason"] = output.stop_reason
            rest["prompt_token_ids"] = prompt if wants_ids and first else None
            yield event({"text": output.text, **rest, "token_ids": ids})
    if options.get("include_usage"):
        details = {"prompt_tokens_details": {"cached_tokens": 0}}
        yield data_event({**head, "choices": [], "usage": {**usage(len(prompt), told), **details}})
    yield DONE


def usage(prompt: int, completion: int) -> JsonObject:
    total = prompt + completion
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}


class VllmLike:
    """A decode worker, which keeps its requests. It is lost after `dies_after` events of each
    request."""

    def __init__(
        self,
        *,
        seed: int = 0,
        dies_after: int | None = None,
        dies: Answer | None = None,
        counts: Callable[[int], int] = lambda _: 1,
    ) -> None:
        self.model = Model(seed)
        self.dies_after = dies_after
        self._dies, self._counts = dies, counts
        self.asked: list[JsonObject] = []
        self.under_way = 0

    async def __call__(self, body: JsonObject, reply: Reply) -> None:
        self.asked.append(body)
        self.under_way += 1
        try:
            await self._answer(body, reply)
        finally:
            self.under_way -= 1

    async def _answer(self, body: JsonObject, reply: Reply) -> None:
        await reply.begin(200, EVENTS)
        told = events(self.model, body, reply.headers["x-request-id"], self._counts)
        for number, event in enumerate(told):
            if number == self.dies_after:
                await reply.write(event[: len(event) // 2])
                if self._dies is not None:
                    await self._dies(body, reply)
                return
            await reply.write(event)
            await asyncio.sleep(0)


async def detokenizes(body: JsonObject, reply: Reply) -> None:
    """Answers POST /detokenize."""
    await reply.begin(200, "application/json")
    text = TOKENIZER.decode(body["tokens"], skip_special_tokens=False)
    await reply.write(json.dumps({"prompt": text}).encode())


async def lists_models(_body: JsonObject, reply: Reply) -> None:
    """Answers GET /v1/models."""
    await reply.begin(200, "application/json")
    card = {"id": "llama", "object": "model", "max_model_len": CONTEXT}
    await reply.write(json.dumps({"object": "list", "data": [card]}).encode())
