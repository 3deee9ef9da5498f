"""The fabrics that the engine is tested on, and their options.

KVXFER_TEST_FABRICS: comma-separated names out of FABRICS, in place of those that work anywhere
    (with ofi's, over libfabric's tcp provider, if KVXFER_LIBFABRIC names a library).
KVXFER_TEST_NICS: the number of NICs that an engine uses, 2 by default.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kvxfer.engine.native import native
from verify.polling import PATIENCE

FABRICS = ("tcp", "local", "verbs", "ofi", "ofi-strict")


def chosen() -> list[str]:
    """The fabrics to test on."""
    asked = os.environ.get("KVXFER_TEST_FABRICS")
    if asked:
        # The C++ tests, which have their own fabrics, read the same variable.
        return [fabric for fabric in FABRICS if fabric in asked.split(",")]
    ofi = "ofi" in native.BUILT_FABRICS and bool(os.environ.get("KVXFER_LIBFABRIC"))
    return ["tcp", "local", *(["ofi", "ofi-strict"] if ofi else [])]


def nics_per_engine() -> int:
    return int(os.environ.get("KVXFER_TEST_NICS") or 2)


def rdma_devices() -> list[str]:
    """The host's RDMA devices, in the order of the numbers in their names."""
    folder = Path("/sys/class/infiniband")
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return sorted(names, key=lambda name: [int(part) for part in re.findall(r"\d+", name)])


def engine_options(fabric: str) -> dict[str, Any]:
    """The arguments of Engine() for an engine that has only this fabric."""
    # On a busy machine, or with software RDMA, an engine's thread may have no core for long.
    patient = {"peer_timeout": PATIENCE}
    match fabric:
        case "verbs":
            return {
                "fabrics": ["verbs"],
                "nics": rdma_devices()[: nics_per_engine()],
                **patient,
            }
        case "ofi" | "ofi-strict":
            return {
                "fabrics": ["ofi"],
                "ofi_provider": "tcp",
                "tuning": {"ofi_endpoints": nics_per_engine()},
                "ofi_strict": fabric == "ofi-strict",
                **patient,
            }
    return {"fabrics": [fabric], **patient}
