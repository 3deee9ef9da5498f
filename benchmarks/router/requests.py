"""The requests of clients, and those that the router makes of them, as bytes."""

from __future__ import annotations

import secrets
from typing import Any, Final

from benchmarks.control.generator import request
from kvxfer.client import calls
from kvxfer.prefix_hashes import asked_hashes

MODEL: Final = "llama"
PROMPT_TOKENS: Final = 512
_WORD: Final = "word"


def completion(tokens: int) -> bytes:
    """Returns a request for a stream of `tokens` tokens, of a text that no request before had."""
    return request("POST", "/v1/completions", _body(max_tokens=tokens, stream=True))


def prefill() -> bytes:
    """Returns the request to prefill: one token, in one piece."""
    return request("POST", "/v1/completions", _body(max_tokens=1, stream=False))


def tokenize() -> bytes:
    return request("POST", "/tokenize", {"model": MODEL, "prompt": _prompt()})


def open_transfer() -> bytes:
    """Returns the request to the control plane for a prompt whose tokens are known."""
    prefix = asked_hashes(range(PROMPT_TOKENS), MODEL)
    call = calls.open_transfer(
        request_id=secrets.token_hex(8),
        model=MODEL,
        prompt_tokens=PROMPT_TOKENS,
        prefix_hashes=prefix.hashes,
        tokens_per_hash=prefix.tokens_per_hash,
    )
    return request(call.method, call.path, call.body)


def _body(**members: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": _prompt(), "temperature": 0, **members}


def _prompt() -> str:
    return " ".join([secrets.token_hex(8), *[_WORD] * (PROMPT_TOKENS - 1)])
