"""The fabrics that need no RDMA NIC, and what the host permits them."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable

from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host


def tcp(listen: Callable[[], None] | None = None) -> Finding:
    """Checks tcp. `listen` opens and closes a listener, and raises OSError if it cannot."""
    try:
        (listen or _listen_on_loopback)()
    except OSError as error:
        return Finding(
            Area.FABRICS,
            "tcp",
            Status.BROKEN,
            f"no TCP listener can be opened on 127.0.0.1: {error}",
            "give this process a network namespace with loopback up: ip link set lo up",
        )
    return Finding(Area.FABRICS, "tcp", Status.OK, "to every peer that can be reached over IP")


def local_shared(create: Callable[[], None] | None = None) -> Finding:
    """Checks the local fabric from memory that the engine allocated: shared mappings of a memfd."""
    try:
        (create or _create_memfd)()
    except OSError as error:
        return Finding(
            Area.FABRICS,
            "local, shared memory",
            Status.LIMITED,
            f"memfd_create is refused: {error}; peers on this host are reached over tcp",
            "allow memfd_create in the container's seccomp profile",
        )
    return Finding(
        Area.FABRICS,
        "local, shared memory",
        Status.OK,
        "from memory of engine.alloc(), to peers on this host",
    )


def local_cma(host: Host, read: Callable[[], None] | None = None) -> Finding:
    """Checks the local fabric from registered memory: process_vm_readv, which Yama and seccomp may
    refuse."""
    name = "local, process_vm_readv"
    falls_back = "registered memory goes to peers on this host over tcp"
    try:
        (read or _read_own_memory)()
    except OSError as error:
        return Finding(
            Area.FABRICS,
            name,
            Status.LIMITED,
            f"process_vm_readv is refused: {error}; {falls_back}",
            "allow process_vm_readv in the container's seccomp profile",
        )
    scope = host.text("proc/sys/kernel/yama/ptrace_scope")
    if scope in ("2", "3"):
        return Finding(
            Area.FABRICS,
            name,
            Status.LIMITED,
            f"Yama forbids it (ptrace_scope {scope}); {falls_back}",
            "sysctl kernel.yama.ptrace_scope=1, or use engine.alloc()"
            if scope == "2"
            else "ptrace_scope 3 lasts until reboot: boot with 1, or use engine.alloc()",
        )
    permitted = {
        None: "no Yama",
        "0": "Yama ptrace_scope 0",
        "1": "Yama ptrace_scope 1: each engine permits its authenticated peers",
    }.get(scope, f"Yama ptrace_scope {scope}")
    return Finding(
        Area.FABRICS, name, Status.OK, f"from registered memory, to peers on this host; {permitted}"
    )


def pidfd(open_own: Callable[[], None] | None = None) -> Finding:
    """Checks pidfd_open, by which an engine sees at once that a process on this host has ended."""
    try:
        (open_own or _open_own_pidfd)()
    except OSError as error:
        return Finding(
            Area.FABRICS,
            "pidfd",
            Status.LIMITED,
            f"pidfd_open is refused: {error}; a dead peer is seen by its connection alone",
            "use Linux 5.3 or newer, and allow pidfd_open in the container's seccomp profile",
        )
    return Finding(Area.FABRICS, "pidfd", Status.OK, "a dead process on this host is seen at once")


def namespaces(host: Host) -> Finding:
    """Reports the PID and user namespace: local works only between processes with the same ones."""
    spaces = []
    for kind in ("pid", "user"):
        try:
            spaces.append((host.root / "proc/self/ns" / kind).readlink().name)
        except OSError:
            spaces.append(f"{kind}:unknown")
    return Finding(
        Area.FABRICS,
        "namespaces",
        Status.INFO,
        f"{' '.join(spaces)}; local works between processes that show the same, others on this "
        "host use tcp",
    )


def _listen_on_loopback() -> None:
    socket.create_server(("127.0.0.1", 0)).close()


def _create_memfd() -> None:
    os.close(os.memfd_create("kvxfer-doctor"))


def _open_own_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read_own_memory() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    source, destination = (ctypes.create_string_buffer(b"x"), ctypes.create_string_buffer(1))
    remote, local = (_Iovec(ctypes.addressof(each), 1) for each in (source, destination))
    got = libc.process_vm_readv(
        os.getpid(), ctypes.byref(local), 1, ctypes.byref(remote), 1, ctypes.c_ulong(0)
    )
    if got != 1:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
