"""The kernel's notation for sets of CPUs: "0-47,96-143"."""

from __future__ import annotations

from collections.abc import Iterable


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Returns the CPUs in ascending order; none for an empty or invalid list."""
    cpus: set[int] = set()
    try:
        for part in filter(None, text.strip().split(",")):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return ()
    return tuple(sorted(cpus))


def format_cpu_list(cpus: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
