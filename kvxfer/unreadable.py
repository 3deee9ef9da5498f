"""What decoding bytes from outside may raise."""

from __future__ import annotations

from typing import Final

import msgspec

UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""msgspec's own errors, and those of Python that it lets through: text that is no UTF-8, nesting
without an end. To be caught around msgspec's decoders and convert()."""
