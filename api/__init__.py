"""The control plane over HTTP: a FastAPI application on top of a registry."""
