from __future__ import annotations

import random

from kvxfer.reference.tokens import ByteTokenizer
from kvxfer.reference.worker.text_stream import TextStream


def pieces(tokens: list[int]) -> list[str]:
    stream = TextStream(ByteTokenizer())
    return [*(stream.push(token) for token in tokens), stream.flush()]


def test_a_character_comes_when_it_is_complete() -> None:
    assert pieces(list("a€b".encode())) == ["a", "", "", "€", "b", ""]


def test_a_torn_character_comes_at_the_end() -> None:
    assert pieces(list("a€".encode())[:-1]) == ["a", "", "", "\ufffd"]


def test_pieces_of_any_tokens_are_the_text_of_all(rng: random.Random) -> None:
    for _ in range(300):
        tokens = [
            byte
            for _ in range(rng.randrange(40))
            for byte in rng.choice(
                [bytes([rng.randrange(256)]), "é".encode(), "€".encode(), "🙂".encode(), b"a"]
            )
        ]
        assert "".join(pieces(tokens)) == ByteTokenizer().decode(tokens)
