"""Kills the process groups that a driver has left when it has ended, and removes their folders.

Reads lines from stdin: `+ID FOLDER` for a group that was started, `-ID` for one that was reaped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: dict[int, str] = {}
    for line in sys.stdin:
        number, _, folder = line[1:].strip().partition(" ")
        if line[0] == "+":
            groups[int(number)] = folder
        else:
            groups.pop(int(number), None)
    for group, folder in groups.items():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
