"""Types of command line arguments for argparse, whose errors name the argument and the value."""

from __future__ import annotations

import argparse


def above_zero(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def minutes_to_run(text: str) -> float:
    """Parses a number of minutes: at least 0.1, which leaves time for some samples."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value < 1e5:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes from 0.1 up")
    return value
