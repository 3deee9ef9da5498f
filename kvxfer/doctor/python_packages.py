"""The installed parts of kvxfer: the native engine, and extras."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from kvxfer.doctor.finding import Area, Finding, Status

# Each extra, its packages, and their purpose.
EXTRAS = (
    ("server", ("fastapi", "prometheus-client", "structlog", "uvicorn"), "kvxfer serve"),
    ("torch", ("safetensors", "torch"), "kvxfer demo and torch tensors"),
    ("plot", ("matplotlib",), "kvxfer bench --plot"),
)


def native_module(name: str = "kvxfer._native") -> Finding:
    """Checks the compiled engine: without it nothing moves."""
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


def interpreter() -> Finding:
    return Finding(
        Area.PYTHON,
        "Python",
        Status.OK,
        f"{platform.python_implementation()} {platform.python_version()}",
    )


def extras(installed: Callable[[str], str] = version) -> list[Finding]:
    """Checks the packages of each extra. `installed` returns a package's version or raises
    PackageNotFoundError. Nothing is imported."""
    findings = []
    for extra, packages, purpose in EXTRAS:
        present, missing = [], []
        for package in packages:
            try:
                present.append(f"{package} {installed(package)}")
            except PackageNotFoundError:
                missing.append(package)
        if missing:
            findings.append(
                Finding(
                    Area.PYTHON,
                    f"kvxfer[{extra}]",
                    Status.ABSENT,
                    f"{', '.join(missing)} missing; needed for {purpose}",
                    f"pip install 'kvxfer[{extra}]'",
                )
            )
        else:
            findings.append(Finding(Area.PYTHON, f"kvxfer[{extra}]", Status.OK, ", ".join(present)))
    return findings
