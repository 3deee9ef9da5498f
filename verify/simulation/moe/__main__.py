"""Simulates MoE groups with many seeds (`make simulate SUITE=moe`); `--seed N --trace` replays one.

Exit code 1 if a promise was broken.
"""

from __future__ import annotations

import sys

from verify.simulation.seeds import Simulation

from .defects import DEFECTS
from .fate import FAULTS, simulate

SIMULATION = Simulation(
    program="verify.simulation.moe",
    about=__doc__,
    simulate=simulate,
    seeds=20_000,
    jobs=1,
    faults=FAULTS,
    defects=DEFECTS,
)

if __name__ == "__main__":
    sys.exit(SIMULATION.main())
