"""Requests per second of the control plane with a large fleet, beside an empty FastAPI route."""
