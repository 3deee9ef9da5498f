"""Every argument of every public call of the engine: the error names a wrong one, with its value.

The calls are found in the classes. A call that is added has to be added to `right` below.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any, Final

import numpy as np
import pytest

import kvxfer
from kvxfer import (
    OperationGroup,
    PeerGroup,
    PolledEngine,
    ReceivePool,
    RemotePool,
    Watcher,
    alloc_shared,
)
from kvxfer.engine.native import native
from kvxfer.errors import InvalidArgument, OutOfBounds
from tests.engine.conftest import KEY, new_engine
from verify.polling import PATIENCE

pytestmark = pytest.mark.native

Call = tuple[Callable[..., Any], dict[str, Any]]

THING: Final = object()
NOT_WHOLE: Final = (-1, 2**64, 4096.0, "4096", THING)
NOT_IMMEDIATE: Final = (-1, 2**32, 1.5, "7", THING)
NOT_SECONDS: Final = (-1, float("nan"), "soon", THING)
NOT_LISTED: Final = (5, "regions", THING)
NOT_NUMBERS: Final = (5, "0", [0.5], ["0"], np.zeros(1), np.zeros((1, 1), int), {0}, THING)

WRONG: Final[dict[str, tuple[object, ...]]] = {
    "Address": (5, b"kvx", "http://127.0.0.1:1", THING),
    "Buffer": (5, "text", THING),
    "Bytes": (0, *NOT_WHOLE),
    "Callable": (5, "name", THING),
    "Count": NOT_WHOLE,
    "Counter": (5, THING),
    "Descriptor": (5, "text", b"short", THING),
    "Engine": (5, "engine", THING),
    "EngineCore": (5, "engine", THING),
    "Gpu": (-1, 1.5, "0", THING),
    "Imm": NOT_IMMEDIATE,
    "Integers": NOT_NUMBERS,
    "Length": NOT_WHOLE,
    "Nic": NOT_IMMEDIATE,
    "Offer": (5, "offer", THING),
    "Offset": NOT_WHOLE,
    "Peer": (5, "peer", THING),
    "Ranges": (5, [(1, 2)], [(THING, 0, 1)], [5]),
    "Readable": (5, "text", np.zeros((4, 4))[:, ::2], THING),
    "Region": (5, b"bytes", np.zeros(8), THING),
    "Seconds": NOT_SECONDS,
    "Sequence[Descriptor]": (*NOT_LISTED, [5], [b"short"]),
    "Sequence[Operation]": (*NOT_LISTED, [5]),
    "Sequence[Peer]": (*NOT_LISTED, [5]),
    "Sequence[Region]": (*NOT_LISTED, [5]),
    "Slots": (0, -1, 1.5, "8", THING),
    "Stream": ("stream", 1.5, THING),
    "Stride": NOT_WHOLE,
    "WatchFor": (5, "layer", (1, 2), THING),
    "Writable": (5, "text", b"constant", THING),
    "bool": ("yes", THING),
}
# These take anything, or other tests check their errors.
FREE: Final = {"owner", "target", "cluster_key", "clock", "options"}
MADE_BY_USERS: Final = {"OperationGroup", "PeerGroup", "ReceivePool", "RemotePool"}
# Other classes have private constructors, as an engine makes their objects.


def public_calls() -> dict[str, Callable[..., Any]]:
    """Returns what users call with arguments, by name."""
    calls: dict[str, Callable[..., Any]] = {"alloc_shared": alloc_shared}
    for name in kvxfer.__all__:
        if name in ("EngineHandler", "EngineOptions", "KvxferError", "Received", "WatchFor"):
            continue  # users implement these, or they are data
        made = getattr(kvxfer, name)
        if not inspect.isclass(made):
            continue
        for member, value in inspect.getmembers(made, inspect.isfunction):
            own = member == "__init__" and name in MADE_BY_USERS
            if own or not member.startswith("_"):
                calls[name if own else f"{name}.{member}"] = value
    return {name: call for name, call in calls.items() if arguments_of(call)}


def arguments_of(call: Callable[..., Any]) -> dict[str, str]:
    """Returns the kinds of a call's arguments, by name."""
    parameters = inspect.signature(call).parameters.values()
    return {each.name: each.annotation for each in parameters if each.name not in {"self", *FREE}}


class OnGpu:
    """A watched word on a GPU that does not exist."""

    def __init__(self) -> None:
        self.word = native.WatchWord()

    def add_on(self, _stream: int, by: int) -> None:
        self.word.add(by)


@pytest.fixture
async def right() -> AsyncIterator[dict[str, Call]]:
    """All calls with right arguments."""
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(new_engine("tcp", "engine"))
        other = await stack.enter_async_context(new_engine("tcp", "other"))
        polled = stack.enter_context(PolledEngine(cluster_key=KEY, fabrics=["tcp"]))
        peer = await engine.connect(other.address, PATIENCE)
        writer = await other.connect(engine.address, PATIENCE)
        memory, target = engine.alloc(4096), other.alloc(4096)
        counter = engine.counter(peer)
        watcher, on_gpu = engine.watcher(), Watcher(engine.native, OnGpu())  # type: ignore[arg-type]
        lent, pool = ReceivePool(other, 8, 64), ReceivePool(engine, 8, 64)
        offer = lent.offer(writer, 4)
        remote = RemotePool(peer, offer)
        group = PeerGroup(engine, [peer])
        operation = peer.write_imm(other.counter().imm)
        await operation
        at = {"imm": other.counter().imm, "timeout": 9.0, "nic": None, "after": watcher.at(0)}
        there = {"src": memory, "dst": target.descriptor}
        offsets = {"src_offset": 0, "dst_offset": 0}
        pages = {"src_pages": range(1), "dst_pages": [1], "src_stride": 8, "dst_stride": 8}
        runs = {"src_offsets": [0], "dst_offsets": [0], "lengths": [8]}
        listed = {"src": [memory], "dst": [target.descriptor]}
        of_all = {"imm": at["imm"], "timeout": 9.0, "after": None}
        sums = {"offsets": [0], "numbers": [1], "length": 8}
        on = {"stream": 1, "total": 1, "timeout": 1.0, "gpu": 0, "at_least": False}

        def told(*_: object) -> bool:
            return True

        of_cores: dict[str, Call] = {
            f"{type(each).__name__}.{name}": (getattr(each, name), arguments)
            for each in (engine, polled)
            for name, arguments in (
                ("alloc", {"nbytes": 64, "gpu": None, "require_nics": False}),
                ("register", {"target": bytearray(64), "nbytes": 64, "require_nics": False}),
                ("counter", {"writer": None}),
                ("watcher", {"gpu": None}),
                ("on_close", {"callback": told}),
                ("forget_on_close", {"callback": told}),
            )
        }
        yield {
            **of_cores,
            "Engine.connect": (engine.connect, {"address": other.address, "timeout": PATIENCE}),
            "Engine.accept": (other.accept, {"timeout": PATIENCE}),
            "PolledEngine.connect": (polled.connect, {"address": other.address, "timeout": 9.0}),
            "PolledEngine.accept": (polled.accept, {"timeout": 0.0}),
            "PolledEngine.poll_until": (polled.poll_until, {"done": told, "timeout": 0.0}),
            "PolledEngine.poll_counter": (
                polled.poll_counter,
                {"counter": polled.counter(), "total": 0, "timeout": 0.0},
            ),
            "Peer.write": (peer.write, {**there, **offsets, "length": 8, **at}),
            "Peer.write_pages": (
                peer.write_pages,
                {**there, **offsets, **pages, "page_length": 8, **at},
            ),
            "Peer.write_list": (peer.write_list, {**listed, **runs, **at}),
            "Peer.write_imm": (peer.write_imm, at),
            "Peer.send": (peer.send, {"data": bytearray(b"hi")}),
            "Peer.receive": (peer.receive, {"timeout": 0.0}),
            "Peer.on_lost": (peer.on_lost, {"callback": told}),
            "Peer.forget_on_lost": (peer.forget_on_lost, {"callback": told}),
            "PeerGroup": (PeerGroup, {"engine": engine, "peers": [peer]}),
            "PeerGroup.scatter": (
                group.scatter,
                {"src": memory, "dst": [target.descriptor], **runs, **of_all},
            ),
            "PeerGroup.barrier": (group.barrier, of_all),
            "Counter.grant": (counter.grant, {"ranges": [(memory, 0, 8)]}),
            "Counter.wait": (counter.wait, {"total": 0, "timeout": 9.0}),
            "Counter.wait_at_least": (counter.wait_at_least, {"total": 0, "timeout": 9.0}),
            "Counter.wait_on": (counter.wait_on, on),
            "Counter.mirror": (counter.mirror, {"gpu": 0}),
            "Counter.on_arrival": (counter.on_arrival, {"callback": told}),
            "Counter.revoke": (engine.counter().revoke, {"then": told}),
            "MemoryRegion.read": (memory.region.read, {"into": bytearray(8), "offset": 0}),
            "MemoryRegion.write": (memory.region.write, {"data": b"12345678", "offset": 0}),
            "MemoryRegion.checksum": (memory.region.checksum, sums),
            "Memory.read": (memory.read, {"into": bytearray(8), "offset": 0}),
            "Memory.write": (memory.write, {"data": b"12345678", "offset": 0}),
            "Memory.checksum": (memory.checksum, sums),
            "alloc_shared": (alloc_shared, {"nbytes": 64}),
            "Watcher.count": (watcher.count, {"by": 1}),
            "Watcher.add": (watcher.add, {"by": 1}),
            "Watcher.add_on": (on_gpu.add_on, {"stream": 1, "by": 1}),
            "Watcher.at": (watcher.at, {"value": 1}),
            "Operation.on_end": (operation.on_end, {"callback": told}),
            "Scattered.on_end": (operation.on_end, {"callback": told}),
            "OperationGroup": (OperationGroup, {"operations": [operation]}),
            "ReceivePool": (ReceivePool, {"engine": engine, "slots": 2, "slot_bytes": 64}),
            "ReceivePool.offer": (pool.offer, {"peer": peer, "slots": 1}),
            "ReceivePool.withdraw": (pool.withdraw, {"peer": peer}),
            "RemotePool": (RemotePool, {"peer": peer, "offer": offer}),
            "RemotePool.send": (
                remote.send,
                {"src": memory, "length": 8, "src_offset": 0, "timeout": 9.0, "after": None},
            ),
            "RemotePool.available": (remote.available, {"timeout": 9.0}),
        }


async def made(call: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    answer = call(**arguments)
    return await answer if inspect.iscoroutine(answer) else answer


def wrong_of(kind: str) -> tuple[object, ...]:
    plain, optional, _ = kind.partition(" | None")
    name = "Callable" if plain.startswith("Callable[") else plain
    return (*WRONG[name], *(() if optional or name == "bool" else (None,)))


async def test_every_wrong_argument_of_every_call_is_named(right: dict[str, Call]) -> None:
    calls = public_calls()
    assert right.keys() == calls.keys()
    unclear = []
    tried = 0
    for name, call in calls.items():
        kinds = arguments_of(call)
        bound, good = right[name]
        assert kinds.keys() == good.keys() - FREE, name
        for argument, kind in kinds.items():
            for value in wrong_of(kind):
                tried += 1
                item = value[0] if isinstance(value, list) and "Sequence" in kind else value
                shown = re.escape(repr(item)[:40])
                try:
                    await made(bound, good | {argument: value})
                except (InvalidArgument, OutOfBounds) as error:
                    if re.search(rf"\b{argument}\b.*{shown}", str(error), re.DOTALL):
                        continue
                    unclear.append(f"{name}({argument}={value!r}): {error}")
                except Exception as error:
                    unclear.append(f"{name}({argument}={value!r}): {error!r:.200}")
                else:
                    unclear.append(f"{name}({argument}={value!r}) is taken")
    assert not unclear, "\n".join(unclear)
    assert tried > 500


async def test_right_arguments_of_every_call_are_taken(right: dict[str, Call]) -> None:
    times_out = {"Peer.receive", "PolledEngine.accept"}
    needs_a_gpu = {"Counter.wait_on", "Counter.mirror"}
    for name, (call, arguments) in right.items():
        if name not in times_out | needs_a_gpu:
            await made(call, arguments)


NUMBERS: Final = [
    pytest.param([3, 1], id="list"),
    pytest.param((3, 1), id="tuple"),
    pytest.param(range(3, 0, -2), id="range"),
    pytest.param(b"\3\1", id="bytes"),
    *(
        pytest.param(np.array([3, 1], kind), id=kind)
        for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
    ),
    pytest.param(np.array([3, 9, 1, 9], np.uint16)[::2], id="strided"),
]


@pytest.mark.parametrize("numbers", NUMBERS)
async def test_page_numbers_are_any_sequence_of_integers(numbers: Any) -> None:
    await moves_two_pages(numbers)


@pytest.mark.parametrize("kind", ["int16", "int32", "int64", "uint8"])
async def test_page_numbers_are_a_tensor(torch: Any, kind: str) -> None:
    await moves_two_pages(torch.tensor([3, 1], dtype=getattr(torch, kind)))


async def moves_two_pages(numbers: Any) -> None:
    async with new_engine("local", "a") as a, new_engine("local", "b") as b:
        source, target = a.alloc(4 * 512), b.alloc(4 * 512)
        np.frombuffer(source, np.uint8)[:] = np.repeat(np.arange(4, dtype=np.uint8), 512)
        peer = await a.connect(b.address, PATIENCE)
        await peer.write_pages(
            source, target.descriptor, page_length=512, src_pages=numbers, dst_pages=numbers
        )
        pages = np.frombuffer(target, np.uint8).reshape(4, 512)
        assert [set(page) for page in pages.tolist()] == [{0}, {1}, {0}, {3}]
