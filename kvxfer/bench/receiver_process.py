"""Starts the receiver process and stops it."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvxfer import _probes
from kvxfer.bench.channel import SocketChannel

_EXIT_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class ReceiverProcess:
    """The sender's view of the receiver process. Both map `mailbox`."""

    pid: int
    channel: SocketChannel
    mailbox: mmap.mmap


@asynccontextmanager
async def receiver_process(pool_bytes: int) -> AsyncIterator[ReceiverProcess]:
    """Runs a receiver with a destination pool of `pool_bytes`; it ends with the context, or when
    this process dies."""
    ours, theirs = socket.socketpair()
    mailbox_fd = os.memfd_create("kvxfer-bench-mailbox")
    try:
        os.truncate(mailbox_fd, _probes.MAILBOX_BYTES)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvxfer.bench.receiver"),
            *(str(theirs.fileno()), str(mailbox_fd), str(pool_bytes)),
            pass_fds=(theirs.fileno(), mailbox_fd),
        )
        mailbox = mmap.mmap(mailbox_fd, _probes.MAILBOX_BYTES)
    finally:
        theirs.close()
        os.close(mailbox_fd)
    channel = await SocketChannel.over(ours)
    try:
        yield ReceiverProcess(process.pid, channel, mailbox)
    finally:
        channel.close()
        try:
            await asyncio.wait_for(process.wait(), _EXIT_TIMEOUT)
        except TimeoutError:
            process.kill()
            await process.wait()
