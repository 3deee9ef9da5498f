"""The errors of a benchmark, beside those of the engine."""

from __future__ import annotations

from kvxfer.errors import KvxferError


class BenchError(KvxferError):
    """The benchmark could not be carried out."""

    code = "bench-failed"


class WrongBytes(BenchError):
    """A destination pool does not hold what was sent."""

    code = "wrong-bytes"


class NotAvailableHere(BenchError):
    """A case needs what this host does not permit; the other cases are measured."""

    code = "not-available-here"
