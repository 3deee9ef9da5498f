"""The lengths of answers, in tokens: a reservation needs one before the answer is computed."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Final

from kvxfer.router.asked import Asked
from kvxfer.router.continuation import limit_of

# The output tokens in the usage of an answer, or of a stream's last event.
_TOLD: Final = re.compile(rb'"(?:completion|output)_tokens": ?(\d+)')
# A mean covers about this many answers.
_ANSWERS: Final = 100
_MOST_MODELS: Final = 1024
# The most that POST /v1/transfers takes.
_MOST_TOKENS: Final = 2**31 - 1


class OutputLengths:
    """The mean length of each model's last answers. Loop only."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def ended(self, model: str | None, tokens: int) -> None:
        """Counts a complete answer of a model."""
        if model is None or not tokens:
            return
        tokens = min(tokens, _MOST_TOKENS)
        count, mean = self._means.pop(model, (0, 0.0))
        count = min(count + 1, _ANSWERS)
        self._means[model] = count, mean + (tokens - mean) / count
        if len(self._means) > _MOST_MODELS:
            self._means.popitem(last=False)

    def expected(self, asked: Asked) -> int | None:
        """Returns the mean of its model's answers, at most what the request allows; None if there
        was no answer yet, or if the route has no output to bound."""
        known = self._means.get(asked.model or "")
        if known is None or not asked.dialect.limit:
            return None
        limit = limit_of(asked)
        mean = max(round(known[1]), 1)
        return mean if limit is None else max(min(mean, limit), 1)


def tokens_told(content: bytes) -> int:
    """Returns the output tokens by the usage in an answer, or in the end of a stream; 0 without."""
    told = _TOLD.findall(content)
    return int(told[-1]) if told else 0
