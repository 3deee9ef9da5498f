"""Processor time and first byte of the router, beside an ASGI pass-through in the same run."""
