"""SGLang's pools in memory of a GPU: `python -m tests.connectors.sglang.gpu_pools`."""

from __future__ import annotations

import random

from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.prompt_digest import prompt_digest
from tests.connectors.sglang.instances import LAYERS, PAGE_BYTES, PAGES, ended, two, until
from tests.cuda import device_memory
from tests.cuda.bindings import context

ROOM = Room(4711, prompt_digest([1, 2, 3]))


def page(of: int, number: int) -> bytes:
    return device_memory.read(of + number * PAGE_BYTES, PAGE_BYTES)


def main() -> None:
    """Pages of the GPU arrive in those of the other side, metadata in its host memory."""
    rng = random.Random(1)
    ours, theirs = (
        [device_memory.allocate(PAGES * PAGE_BYTES) for _ in range(2 * LAYERS)] for _ in range(2)
    )
    for place in ours:
        device_memory.write(place, rng.randbytes(PAGES * PAGE_BYTES))
    for place in theirs:
        device_memory.write(place, bytes(PAGES * PAGE_BYTES))
    with two(places=(ours, theirs)) as both:
        sender, receiver = both.prefill.outgoing(), both.incoming()
        receiver.receive(ROOM, [8, 2, 5], 3)
        sender.begin(ROOM, 3)
        until(lambda: sender.progress is Progress.WAITING)
        sender.send([3, 9], 1)
        sender.send([1], 1)
        ended(sender, receiver)
        assert (sender.progress, receiver.progress) == (Progress.SUCCESS, Progress.SUCCESS)
        for source, target in zip(ours, theirs, strict=True):
            for from_page, to_page in zip((3, 9, 1), (8, 2, 5), strict=True):
                assert page(target, to_page) == page(source, from_page)
            for untouched in set(range(PAGES)) - {8, 2, 5}:
                assert not any(page(target, untouched))
        for mine, other in zip(both.prefill.rows, both.decode.rows, strict=True):
            assert (mine[1] == other[3]).all()
    for place in ours + theirs:
        device_memory.free(place)


if __name__ == "__main__":
    context()
    main()
