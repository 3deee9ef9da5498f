"""Text of output tokens as they come, in pieces that split no character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvxfer.reference.tokens import Tokenizer

_REPLACEMENT: Final = "\ufffd"
# Tokens of the prompt that suffice as context for decoding the next ones.
_CONTEXT: Final = 8


class TextStream:
    """A converter of tokens into pieces of text, which together are the text of all tokens.

    The text of a token may depend on the tokens before it, so the last piece is decoded again with
    the new tokens. A character may take several tokens, so text that ends inside one waits.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt` has the tokens before the first one."""
        self._tokenizer = tokenizer
        context = list(prompt[-_CONTEXT:])
        torn = tokenizer.decode(context).endswith(_REPLACEMENT)
        self._tokens = [] if torn else context
        self._said = len(self._tokens)
        """The number of tokens in the last piece."""

    def push(self, token: int) -> str:
        """Returns the text that `token` completes; empty if there is none yet."""
        self._tokens.append(token)
        return self._advance(last=False)

    def flush(self) -> str:
        """Returns the text that is left after the last token."""
        return self._advance(last=True)

    def _advance(self, *, last: bool) -> str:
        before = self._tokenizer.decode(self._tokens[: self._said])
        text = self._tokenizer.decode(self._tokens)
        if not last and (len(text) <= len(before) or text.endswith(_REPLACEMENT)):
            return ""
        del self._tokens[: self._said]
        self._said = len(self._tokens)
        return text[len(before) :]


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Returns the text of all tokens that follow a prompt."""
    stream = TextStream(tokenizer, prompt)
    return "".join(map(stream.push, tokens)) + stream.flush()
