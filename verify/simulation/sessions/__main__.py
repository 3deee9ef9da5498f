"""Simulates fleets with many seeds on all cores (`make simulate`); `--seed N --trace` replays one.

Exit code 1 if a promise was broken.
"""

from __future__ import annotations

import os
import sys

from verify.simulation.seeds import Simulation

from .defects import DEFECTS
from .fate import FAULTS, REQUEST_FAULTS, simulate

SIMULATION = Simulation(
    program="verify.simulation.sessions",
    about=__doc__,
    simulate=simulate,
    seeds=100_000,
    jobs=os.cpu_count() or 1,
    faults=(*FAULTS, *REQUEST_FAULTS),
    defects=DEFECTS,
)

if __name__ == "__main__":
    sys.exit(SIMULATION.main())
