"""What the control plane does per second with a large fleet, beside an empty FastAPI route."""
