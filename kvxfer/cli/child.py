"""`python -m kvxfer.cli.child PARENT COMMAND...`: a kvxfer command that ends with its parent.

The process gets SIGTERM when its parent, of process id PARENT, ends in any way.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

from kvxfer.cli import main

_PR_SET_PDEATHSIG: Final = 1


def run() -> None:
    parent = int(sys.argv.pop(1))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == parent:
        main()


if __name__ == "__main__":
    run()
