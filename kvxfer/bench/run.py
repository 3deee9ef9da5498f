"""One run: its measurements in order."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from kvxfer.bench.cases import Case
from kvxfer.bench.checksum import measure_checksum
from kvxfer.bench.cpu import measure_cpu, measure_idle
from kvxfer.bench.figures import CaseFigures, IdleFigure, Report
from kvxfer.bench.latency import measure_latency
from kvxfer.bench.limits import Limits
from kvxfer.bench.machine import this_machine
from kvxfer.bench.pair import open_pair
from kvxfer.bench.receiver_process import ReceiverProcess, receiver_process
from kvxfer.bench.set_up import measure_connect, measure_registration
from kvxfer.bench.settings import CPU_PAGE_BYTES, Settings
from kvxfer.bench.throughput import measure_throughput
from kvxfer.errors import NotAvailableHere, PermissionDenied

# Called with what was just measured, once per step.
Progress = Callable[[str], None]


async def run_bench(settings: Settings, progress: Progress) -> Report:
    """Measures everything but idleness. Raises WrongBytes as soon as one byte is wrong."""
    started_at, machine = datetime.now(UTC).isoformat(timespec="seconds"), this_machine()
    async with receiver_process(settings.pool_bytes) as receiver:
        limits = await Limits.open(receiver)
        try:
            cases = [
                await _run_case(receiver, limits, case, settings, progress)
                for case in settings.cases
            ]
            measured = {figures.name for figures in cases if figures.skipped is None}
            connect = [
                await measure_connect(
                    receiver.channel,
                    limits,
                    fabric,
                    settings.connect_rounds,
                    partial(progress, f"connect over {fabric}"),
                )
                for fabric in dict.fromkeys(
                    case.fabric for case in settings.cases if case.name in measured
                )
            ]
        finally:
            limits.close()
    registration = await measure_registration(
        settings.registration_bytes,
        settings.registration_rounds,
        partial(progress, "registration"),
    )
    checksum = await measure_checksum(
        [settings.draw(size) for size in settings.page_bytes],
        settings.rounds,
        partial(progress, "checksums"),
    )
    return Report(
        started_at=started_at,
        machine=machine,
        seed=settings.seed,
        rounds=settings.rounds,
        request_bytes=settings.request_bytes,
        pool_bytes=settings.pool_bytes,
        cases=cases,
        connect=connect,
        registration=registration,
        checksum=checksum,
    )


async def run_idle(
    fabrics: tuple[str, ...], seconds: float, progress: Progress
) -> list[IdleFigure]:
    """Measures an idle pair of each fabric, one after the other."""
    figures = []
    async with receiver_process(pool_bytes=1 << 20) as receiver:
        for fabric in fabrics:
            figures.append(await measure_idle(receiver.channel, fabric, seconds))
            progress(f"idle over {fabric}")
    return figures


async def _run_case(
    receiver: ReceiverProcess, limits: Limits, case: Case, settings: Settings, progress: Progress
) -> CaseFigures:
    try:
        async with open_pair(receiver.channel, case, settings.pool_bytes) as pair:
            # Engine and limit touch all of their pools once before anything is timed.
            sweep = settings.sweep(max(settings.page_bytes))
            await pair.transfer(sweep)
            await limits.transfer(case.limit, sweep, pair.region.address)
            cpu = []
            for size in CPU_PAGE_BYTES:
                cpu.append(await measure_cpu(pair, settings.sweep(size)))
                progress(f"{case.name}: CPU time at {size >> 10} KiB")
            throughput = [
                await measure_throughput(
                    pair,
                    limits,
                    case,
                    settings.draw(size),
                    settings.rounds,
                    partial(progress, f"{case.name}: pages of {size >> 10} KiB"),
                )
                for size in settings.page_bytes
            ]
            latency = [
                await measure_latency(
                    pair, limits, case, each, partial(progress, f"{case.name}: latency")
                )
                for each in settings.latency
            ]
    except (NotAvailableHere, PermissionDenied) as refusal:
        return CaseFigures(case.name, case.limit, skipped=str(refusal))
    return CaseFigures(case.name, case.limit, None, throughput, latency, cpu)
