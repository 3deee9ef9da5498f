from __future__ import annotations

import pytest

from kvxfer.errors import InvalidArgument, ProtocolError
from kvxfer.prompt_digest import prompt_digest
from kvxfer.reference.worker.tail import Tail, decode_tail, encode_tail

TOKENS = [3, 1, 4, 1, 5]
TAIL = Tail(
    model="demo",
    prompt_digest=prompt_digest(TOKENS),
    first_token=9,
    prefill_seconds=0.5,
    computed_at=1_795_046_400.25,
)


def test_a_tail_comes_back_as_it_was() -> None:
    assert decode_tail(encode_tail(TAIL), model="demo", tokens=TOKENS) == TAIL


def test_a_tail_of_another_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="prefill computed another prompt"):
        decode_tail(encode_tail(TAIL), model="demo", tokens=[3, 1, 4, 1, 6])


def test_a_tail_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"prefill ran the model 'demo', this .* 'other'"):
        decode_tail(encode_tail(TAIL), model="other", tokens=TOKENS)


@pytest.mark.parametrize("data", [b"", b"\xff", encode_tail(TAIL)[:-3]])
def test_bytes_that_are_not_a_tail_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="the tail of a transfer cannot be read"):
        decode_tail(data, model="demo", tokens=TOKENS)
