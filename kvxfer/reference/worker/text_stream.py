"""Text of output tokens as they come, cut where no character is torn apart."""

from __future__ import annotations

from typing import Final

from kvxfer.reference.tokens import Tokenizer

_REPLACEMENT: Final = "\ufffd"


class TextStream:
    """Turns tokens into pieces of text; put together they are the text of all tokens.

    What a token means may depend on the ones before it, so the last piece is decoded again with the
    new tokens; a character may take several tokens, so text that ends inside one waits.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._said = 0
        """How many of the tokens the last piece had."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty where there is none yet."""
        self._tokens.append(token)
        return self._advance(last=False)

    def flush(self) -> str:
        """What is left after the last token."""
        return self._advance(last=True)

    def _advance(self, *, last: bool) -> str:
        before = self._tokenizer.decode(self._tokens[: self._said])
        text = self._tokenizer.decode(self._tokens)
        if not last and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        del self._tokens[: self._said]
        self._said = len(self._tokens)
        return text[len(before) :]
