"""SGLang's pools in GPU memory: `python -m tests.connectors.sglang.gpu_pools KIND`."""

from __future__ import annotations

import random
import sys

from kvxfer.connectors.sglang.progress import Progress
from kvxfer.connectors.sglang.rooms import Room
from kvxfer.prompt_digest import prompt_digest
from tests.connectors.sglang.hybrid_pools import HYBRIDS, PAGES_OF_PROMPT, expected
from tests.connectors.sglang.instances import buffer_sizes, ended, two, until
from tests.cuda import device_memory
from tests.cuda.bindings import context

ROOM = Room(4711, prompt_digest([1, 2, 3]))


def main(kind: str) -> None:
    """Moves pages and state between pools of GPUs, and metadata to the other side's host memory."""
    rng = random.Random(1)
    hybrid = HYBRIDS[kind]
    sizes = buffer_sizes(hybrid.states, hybrid.kv_page_bytes)
    ours, theirs = (
        [device_memory.allocate(max(items * nbytes, 1)) for items, nbytes in sizes]
        for _ in range(2)
    )
    for source, target, (items, nbytes) in zip(ours, theirs, sizes, strict=True):
        device_memory.write(source, rng.randbytes(items * nbytes))
        device_memory.write(target, bytes(items * nbytes))
    pages, to = PAGES_OF_PROMPT
    with two(
        places=(ours, theirs),
        states=hybrid.states,
        kv_page_bytes=hybrid.kv_page_bytes,
        mla=hybrid.mla,
    ) as both:
        sender, receiver = both.prefill.outgoing(), both.incoming()
        receiver.receive(ROOM, to, 3, hybrid.target)
        sender.begin(ROOM, len(pages))
        until(lambda: sender.progress is not Progress.BOOTSTRAPPING)
        assert sender.progress is Progress.WAITING, (sender.error, receiver.error)
        sender.send(pages[:2], 1)
        sender.send(pages[2:], 1, hybrid.source)
        ended(sender, receiver)
        assert (sender.progress, receiver.progress) == (Progress.SUCCESS, Progress.SUCCESS)
        of_items = expected(hybrid)
        for source, target, size, wanted in zip(ours, theirs, sizes, of_items, strict=True):
            items, nbytes = size
            for item in range(items):
                there = device_memory.read(target + item * nbytes, nbytes)
                if item in wanted:
                    assert there == device_memory.read(source + wanted[item] * nbytes, nbytes)
                else:
                    assert not any(there)
        for mine, other in zip(both.prefill.rows, both.decode.rows, strict=True):
            assert (mine[1] == other[3]).all()
    for place in ours + theirs:
        device_memory.free(place)


if __name__ == "__main__":
    context()
    main(sys.argv[1])
