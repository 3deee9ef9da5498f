"""Native objects in a forked process, which has none of the threads that they wait for."""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Final

_OF_THIS_PROCESS: Final[weakref.WeakSet[object]] = weakref.WeakSet()


def keep_in_forks(native: object) -> None:
    """A process that is forked from this one does not destroy the object: that would wait for a
    thread of its parent."""
    _OF_THIS_PROCESS.add(native)


def _keep() -> None:
    for native in list(_OF_THIS_PROCESS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


os.register_at_fork(after_in_child=_keep)
