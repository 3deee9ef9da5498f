"""A guard between the search and another package's scorer, which may raise or return no number."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Final

from kvxfer.errors import ScorerFailed
from kvxfer.instances import Instance
from kvxfer.scheduler.scoring import Scorer

_REMEDY: Final = "correct the scorer, or name another one in --pairing-policy"

_log = logging.getLogger("kvxfer.pairing")


class CheckedScorer(Scorer):
    """A scorer whose loads always compare. An instance that the wrapped scorer cannot weigh costs
    infinitely much: it is in no pair and does not hinder others."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.alone_tokens = scorer.alone_tokens
        self._name = type(scorer).__name__
        self._troubles: dict[str, str] = {}
        """The trouble with each instance by its id, the latest last."""

    def load_parts(self, instance: Instance) -> Mapping[str, float]:
        return self._scorer.load_parts(instance)

    def pair_parts(
        self, distance: int, fabric_steps: int, prefix_tokens: int
    ) -> Mapping[str, float]:
        return self._scorer.pair_parts(distance, fabric_steps, prefix_tokens)

    def decode_parts(self, prefix_tokens: int) -> Mapping[str, float]:
        return self._scorer.decode_parts(prefix_tokens)

    def load(self, instance: Instance) -> float:
        """Returns the load, or infinity if there is none; the log says why, once for each cause."""
        try:
            cost = self._scorer.load(instance)
            trouble = None if math.isfinite(cost) else f"its load is {cost}"
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
        name = instance.instance_id
        before = self._troubles.pop(name, None)
        if trouble is None:
            return cost
        self._troubles[name] = trouble
        if trouble != before:
            _log.error("%s; it is in no pair: %s", self._unweighed(name), _REMEDY)
        return math.inf

    def pair(self, distance: int, fabric_steps: int, prefix_tokens: int) -> float:
        """Raises ScorerFailed."""
        return self._finite(
            lambda: self._scorer.pair(distance, fabric_steps, prefix_tokens),
            f"a pair of distance {distance}, with {fabric_steps} fabric steps and {prefix_tokens} "
            "cached tokens",
        )

    def decode(self, prefix_tokens: int) -> float:
        """Raises ScorerFailed."""
        return self._finite(
            lambda: self._scorer.decode(prefix_tokens), f"decode with {prefix_tokens} cached tokens"
        )

    def _finite(self, ask: Callable[[], float], what: str) -> float:
        try:
            cost = ask()
            trouble = None if math.isfinite(cost) else f"the cost is {cost}"
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
        if trouble is None:
            return cost
        raise ScorerFailed(f"the scorer {self._name} cannot weigh {what} ({trouble}); {_REMEDY}")

    def nothing_to_choose(self) -> ScorerFailed:
        """Returns the error for when every pair has an instance that cannot be weighed."""
        latest = next(reversed(self._troubles), None)
        if latest is None:
            return ScorerFailed(f"the costs of the scorer {self._name} add up to inf; {_REMEDY}")
        return ScorerFailed(
            f"{self._unweighed(latest)}, and every pair has such an instance; {_REMEDY}"
        )

    def _unweighed(self, name: str) -> str:
        return f"the scorer {self._name} cannot weigh instance {name!r} ({self._troubles[name]})"
