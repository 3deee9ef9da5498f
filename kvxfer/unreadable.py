"""The errors that decoding bytes from outside may raise."""

from __future__ import annotations

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""msgspec's errors, and Python's that it lets through: text that is not UTF-8, endless nesting.
Catch them around msgspec's decoders and convert()."""
