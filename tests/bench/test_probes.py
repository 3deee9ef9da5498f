"""Tests that the probes move what they report. Their speed is not tested."""

import mmap
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from kvxfer import _probes
from kvxfer.bench import pattern
from kvxfer.bench.pages import PageDraw, PageLists
from kvxfer.bench.pool import HUGE_PAGE_BYTES, anonymous_pool

pytestmark = pytest.mark.native

POOL_BYTES = 4 << 20
# More than one batch of process_vm_readv, and not a multiple of it.
REQUEST_BYTES = (_probes.READV_BATCH + 300) * 1024


@pytest.fixture(scope="module")
def source() -> NDArray[np.uint8]:
    pool = anonymous_pool(POOL_BYTES)
    pattern.fill(pool)
    return pool


@pytest.fixture
def pages() -> PageLists:
    (pages,) = PageDraw(11, 1024, REQUEST_BYTES, POOL_BYTES).draw()
    return pages


def check_exactly(pool: NDArray[np.uint8], pages: PageLists) -> None:
    pattern.verify(pool, pages)
    pattern.wipe(pool, pages)
    pattern.verify_blank(pool)


def test_an_anonymous_pool_is_zero_and_starts_at_a_huge_page() -> None:
    pool = anonymous_pool(POOL_BYTES)
    assert pool.nbytes == POOL_BYTES
    assert pool.ctypes.data % HUGE_PAGE_BYTES == 0
    pattern.verify_blank(pool)


def test_memcpy_moves_exactly_the_pages(source: NDArray[np.uint8], pages: PageLists) -> None:
    pool = anonymous_pool(POOL_BYTES)
    assert _probes.copy_pages(source, pages.src, pool, pages.dst, pages.page_bytes) > 0
    check_exactly(pool, pages)


def test_process_vm_readv_moves_exactly_the_pages_over_several_batches(
    source: NDArray[np.uint8], pages: PageLists
) -> None:
    pool = anonymous_pool(POOL_BYTES)
    elapsed = _probes.read_pages(
        os.getpid(),
        source.ctypes.data,
        source.nbytes,
        pages.src,
        pool,
        pages.dst,
        pages.page_bytes,
    )
    assert elapsed > 0
    check_exactly(pool, pages)


def test_a_process_that_does_not_exist_is_an_os_error(
    source: NDArray[np.uint8], pages: PageLists
) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(ProcessLookupError):
        _probes.read_pages(
            child, source.ctypes.data, source.nbytes, pages.src, source, pages.dst, pages.page_bytes
        )


@pytest.mark.parametrize(
    ("src", "dst", "page_bytes", "error"),
    [
        ([0, 1], [0], 1024, ValueError),
        ([POOL_BYTES // 1024], [0], 1024, IndexError),
        ([0], [-1], 1024, IndexError),
        ([0], [0], 0, ValueError),
    ],
)
def test_invalid_pages_are_refused(
    source: NDArray[np.uint8],
    src: list[int],
    dst: list[int],
    page_bytes: int,
    error: type[Exception],
) -> None:
    pool = anonymous_pool(POOL_BYTES)
    with pytest.raises(error):
        _probes.copy_pages(source, np.array(src), pool, np.array(dst), page_bytes)
    pattern.verify_blank(pool)


def test_a_read_only_destination_is_refused(source: NDArray[np.uint8], pages: PageLists) -> None:
    pool = np.zeros(POOL_BYTES, np.uint8)
    pool.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        _probes.copy_pages(source, pages.src, pool, pages.dst, pages.page_bytes)


@pytest.fixture
def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_raw_tcp_ends_when_every_byte_was_received_each_time(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = connection
    nbytes = (3 << 20) + 17
    buffer = np.ones(1 << 20, np.uint8)
    with sender, receiver, ThreadPoolExecutor(1) as pool:
        received = pool.submit(_probes.tcp_receive, receiver.fileno(), nbytes, 2, buffer.copy())
        durations = _probes.tcp_send(sender.fileno(), nbytes, 2, buffer)
        received.result()
        assert [duration > 0 for duration in durations] == [True, True]
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(1)


@pytest.mark.parametrize("spin", [True, False])
def test_each_tcp_message_arrives_after_it_was_sent_and_before_the_next(
    connection: tuple[socket.socket, socket.socket], spin: bool
) -> None:
    sender, receiver = connection
    with sender, receiver, ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(_probes.tcp_pong, receiver.fileno(), 4096, 20, spin)
        sent = _probes.tcp_ping(sender.fileno(), 4096, 20, 0, spin)
    in_turn = [at for pair in zip(sent, arrived.result(), strict=True) for at in pair]
    assert in_turn == sorted(in_turn)
    assert len(in_turn) == 40


def test_a_peer_that_hangs_up_is_an_os_error(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = connection
    receiver.close()
    with sender, pytest.raises(ConnectionResetError):
        _probes.tcp_send(sender.fileno(), 1 << 20, 1, np.ones(1 << 20, np.uint8))


@pytest.mark.parametrize("spin", [True, False])
@pytest.mark.parametrize("remote", [True, False])
def test_each_mail_is_taken_after_it_was_posted_and_before_the_next(
    spin: bool, remote: bool
) -> None:
    mailbox = mmap.mmap(-1, _probes.MAILBOX_BYTES)
    page = np.ones(_probes.MAIL_PAGE_BYTES, np.uint8)
    source = (os.getpid(), page.ctypes.data) if remote else None
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(_probes.mailbox_take, mailbox, 20, spin, source)
        posted = _probes.mailbox_post(mailbox, 20, 0, spin)
    in_turn = [at for pair in zip(posted, taken.result(), strict=True) for at in pair]
    assert in_turn == sorted(in_turn)
    assert len(in_turn) == 40


def test_a_mailbox_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match=str(_probes.MAILBOX_BYTES)):
        _probes.mailbox_post(mmap.mmap(-1, mmap.PAGESIZE), 1, 0, True)


def test_an_empty_buffer_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        _probes.tcp_send(0, 1, 1, np.empty(0, np.uint8))
