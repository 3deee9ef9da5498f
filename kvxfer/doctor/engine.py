"""Is the native engine there, and can it do its work."""

from __future__ import annotations

import importlib

from kvxfer.doctor.finding import Area, Finding, Status


def native_module(name: str = "kvxfer._native") -> Finding:
    """The compiled engine: without it nothing moves."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        return Finding(
            Area.ENGINE,
            "native engine",
            Status.BROKEN,
            f"{name} cannot be imported: {error}",
            "reinstall with a C++20 compiler, libssl-dev and libxxhash-dev present: "
            "pip install --force-reinstall --no-deps kvxfer (in a checkout: scripts/setup demo)",
        )
    return Finding(Area.ENGINE, "native engine", Status.OK, str(module.__file__))
