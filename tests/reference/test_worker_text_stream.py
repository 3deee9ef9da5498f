from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from kvxfer.reference.tokens import ByteTokenizer, FileTokenizer
from kvxfer.reference.worker.text_stream import TextStream, text_after


def pieces(tokens: list[int]) -> list[str]:
    stream = TextStream(ByteTokenizer())
    return [*(stream.push(token) for token in tokens), stream.flush()]


def test_a_character_is_sent_when_it_is_complete() -> None:
    assert pieces(list("a€b".encode())) == ["a", "", "", "€", "b", ""]


def test_an_incomplete_character_is_sent_at_the_end() -> None:
    assert pieces(list("a€".encode())[:-1]) == ["a", "", "", "\ufffd"]


def test_pieces_of_any_tokens_add_up_to_the_whole_text(rng: random.Random) -> None:
    for _ in range(300):
        tokens = [
            byte
            for _ in range(rng.randrange(40))
            for byte in rng.choice(
                [bytes([rng.randrange(256)]), "é".encode(), "€".encode(), "🙂".encode(), b"a"]
            )
        ]
        assert "".join(pieces(tokens)) == ByteTokenizer().decode(tokens)


def test_the_first_token_has_the_text_that_it_has_after_the_prompt(tmp_path: Path) -> None:
    """An answer then continues the same way after it has become a part of the prompt."""
    words = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, "▁one"))
    words.decoder = decoders.Metaspace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert text_after(tokenizer, [0], [1, 2]) == " two three"
    assert text_after(tokenizer, [], [0, 1, 2]) == "one two three"
    for cut in (1, 2):
        before, after = [0, 1, 2][:cut], [0, 1, 2][cut:]
        whole = text_after(tokenizer, [], before) + text_after(tokenizer, before, after)
        assert whole == "one two three"


def test_a_prompt_that_ends_within_a_character_is_not_used_as_context() -> None:
    torn = list("a€".encode())[:-1]
    assert text_after(ByteTokenizer(), torn, list(b"bc")) == "bc"
