"""The receiver process of the benchmark: `python -m kvxfer.bench.receiver`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import socket
import time
from collections.abc import Awaitable

from kvxfer import _probes
from kvxfer.bench import messages as m
from kvxfer.bench.channel import SocketChannel
from kvxfer.bench.destination import Destination
from kvxfer.bench.probe_end import ProbeEnd
from kvxfer.errors import BenchError, KvxferError, NotAvailableHere


async def respond(request: m.Request, destination: Destination, probes: ProbeEnd) -> m.Answer:
    """Does what is asked. Raises KvxferError or OSError if it fails."""
    match request:
        case m.OpenEngine(fabrics, cluster_key):
            return m.EngineOpened(*await destination.open_engine(fabrics, cluster_key))
        case m.CloseEngine():
            await destination.close_engine()
        case m.NewCounters(count):
            return m.Counters(destination.new_counters(count))
        case m.AwaitArrivals():
            return m.Times(await destination.arrivals())
        case m.CheckWrites(draw, total):
            await destination.check_writes(draw, total)
        case m.ReadCpuSeconds():
            return m.CpuSeconds(time.process_time())
        case m.CopyPages(draw):
            durations = probes.copy_pages(draw.draw())
            destination.check_pages(draw)
            return m.Durations(durations)
        case m.ReadPages(draw, pid, address):
            durations = probes.read_pages(draw.draw(), pid, address)
            destination.check_pages(draw)
            return m.Durations(durations)
        case m.TcpListen():
            return m.TcpPort(probes.listen())
        case m.TcpAccept():
            await probes.accept()
        case m.TcpReceive(nbytes, times):
            await probes.tcp_receive(nbytes, times)
        case m.TcpPong(message_bytes, count, spin):
            return m.Times(await probes.tcp_pong(message_bytes, count, spin))
        case m.MailboxTake(count, spin, remote):
            return m.Times(await probes.mailbox_take(count, spin, remote))
    return m.Done()


async def serve(channel: SocketChannel, destination: Destination, probes: ProbeEnd) -> None:
    """Answers requests until the sender is gone."""
    while (request := await channel.next_request()) is not None:
        await channel.answer(
            await answer_or_failure(request, respond(request, destination, probes))
        )


async def answer_or_failure(
    request: m.Request | m.HostRequest, answering: Awaitable[m.Answer]
) -> m.Answer:
    """Returns the answer, or why there is none."""
    try:
        return await answering
    except KvxferError as error:
        return m.Failed(error.code, str(error))
    except PermissionError as error:
        return m.Failed(NotAvailableHere.code, f"{type(request).__name__}: {error}")
    except OSError as error:
        return m.Failed(BenchError.code, f"{type(request).__name__}: {error}")


async def main(channel_fd: int, mailbox_fd: int, pool_bytes: int) -> None:
    channel = await SocketChannel.over(socket.socket(fileno=channel_fd))
    destination = Destination(pool_bytes)
    probes = ProbeEnd(destination.pool, mmap.mmap(mailbox_fd, _probes.MAILBOX_BYTES))
    try:
        await serve(channel, destination, probes)
    finally:
        await destination.close_engine()
        probes.close()
        channel.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("channel_fd", type=int)
    parser.add_argument("mailbox_fd", type=int)
    parser.add_argument("pool_bytes", type=int)
    arguments = parser.parse_args()
    # Ctrl-C reaches both processes; the sender is the one that reports it.
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.channel_fd, arguments.mailbox_fd, arguments.pool_bytes))
