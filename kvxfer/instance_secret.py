"""The secret that comes with the lease of an instance, which calls as the instance show.

The worker's process has it in memory. `kvxfer drain` on the same host, such as a preStop hook,
finds it in a file that only the worker's user can read.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

HEADER: Final = "Kvxfer-Instance-Secret"


def keep_secret(instance_id: str, secret: str) -> Path:
    """Writes the secret to a file and returns its path: in KVXFER_RUNTIME_DIR, else in the user's
    runtime folder, else in a folder for this user among the temporary files. Raises OSError."""
    file = _file(instance_id)
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A new file that only this user can read, whatever another user has put there.
    descriptor, path = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as written:
            written.write(secret)
        Path(path).replace(file)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    return file


def kept_secret(instance_id: str) -> str | None:
    """Returns the secret that a worker of this user keeps; None if none can be read."""
    try:
        return _file(instance_id).read_text(encoding="ascii").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def _file(instance_id: str) -> Path:
    folder = os.environ.get("KVXFER_RUNTIME_DIR")
    if not folder:
        user = os.environ.get("XDG_RUNTIME_DIR")
        folder = f"{user}/kvxfer" if user else f"{tempfile.gettempdir()}/kvxfer-{os.geteuid()}"
    return Path(folder, f"{instance_id}.secret")
