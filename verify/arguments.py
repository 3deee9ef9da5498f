"""Types of command line arguments, for argparse: it names the argument and the value."""

from __future__ import annotations

import argparse


def above_zero(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def minutes_to_run(text: str) -> float:
    """A tenth of a minute at least, which has room for some samples."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value < 1e5:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes from 0.1 on")
    return value
