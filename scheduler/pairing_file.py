"""The pairing file: which scorer ranks the pairs, and how it is set."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from kvxfer.errors import InvalidArgument
from kvxfer.scheduler.documents import convert, read_document
from kvxfer.scheduler.scoring import Scorer, WeightedScorer, Weights

ENTRY_POINTS: Final = "kvxfer.scorers"
_WEIGHTED: Final = "weighted"
_REFERENCE: Final = "docs/pairing.md"


class PairingFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    scorer: str = _WEIGHTED
    """`weighted`, or the name of an entry point of the group `kvxfer.scorers`."""
    weights: Weights = Weights()
    """The weights of the scorer `weighted`."""
    tenants: dict[str, Annotated[float, msgspec.Meta(gt=0, le=1e6)]] = {}
    """The tenants whose waiting requests take turns, and their weights."""
    alone_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The value of Scorer.alone_tokens; 0 leaves the scorer's."""
    options: dict[str, Any] = {}
    """The keyword arguments of any other scorer's constructor."""


class PairingPolicy(NamedTuple):
    """The content of a pairing file."""

    scorer: Scorer
    tenants: Mapping[str, float]


def read_pairing_file(path: Path) -> PairingPolicy:
    """Raises InvalidArgument that names the file, the member, its value and the remedy."""
    return parse_pairing_file(str(path), read_document(path, "pairing policy"))


def parse_pairing_file(name: str, document: Any) -> PairingPolicy:
    file = convert(name, document, PairingFile, reference=_REFERENCE)
    scorer = _scorer(name, file)
    scorer.alone_tokens = file.alone_tokens or scorer.alone_tokens
    return PairingPolicy(scorer, file.tenants)


def _scorer(name: str, file: PairingFile) -> Scorer:
    if file.scorer == _WEIGHTED:
        if file.options:
            raise InvalidArgument(
                f"{name}: options is {file.options!r}, but the scorer 'weighted' has none; write "
                "weights"
            )
        return WeightedScorer(file.weights)
    if file.weights != Weights():
        raise InvalidArgument(
            f"{name}: weights are those of the scorer 'weighted', and scorer is {file.scorer!r}; "
            "write options"
        )
    return _third_party(name, file)


def _third_party(name: str, file: PairingFile) -> Scorer:
    found = entry_points(group=ENTRY_POINTS)
    if file.scorer not in found.names:
        known = ", ".join(sorted({_WEIGHTED, *found.names}))
        raise InvalidArgument(
            f"{name}: scorer is {file.scorer!r}, which no installed package has as an entry point "
            f"of the group {ENTRY_POINTS!r}; choose one of {known}"
        )
    try:
        scorer = found[file.scorer].load()(**file.options)
    except Exception as error:
        raise InvalidArgument(
            f"{name}: the scorer {file.scorer!r} cannot be made with options {file.options!r} "
            f"({type(error).__name__}: {error}); see its own documentation"
        ) from error
    if not isinstance(scorer, Scorer):
        raise InvalidArgument(
            f"{name}: the scorer {file.scorer!r} gave a {type(scorer).__name__}; it has to be a "
            "kvxfer.scheduler.scoring.Scorer"
        )
    return scorer
