"""A training process pushes its weights to an inference process after each step.

    python examples/python/weight_update.py

docs/weights.md explains what happens. On several hosts, give Engine() and push() a `host`.
"""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing as mp
import os
import secrets
import time
from multiprocessing.connection import Connection

import torch
from torch import nn

from kvxfer import Engine
from kvxfer.errors import WeightsMismatch
from kvxfer.weights import Holdings, Staged, WeightReceiver, forget, push, state_of


def make_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 1024), nn.Linear(1024, 256))


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for parameter in model.state_dict().values():
        found.update(parameter.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


# --- inference


def serve(trainer: Connection, wanted: Holdings) -> None:
    asyncio.run(serving(trainer, wanted))


async def serving(trainer: Connection, wanted: Holdings) -> None:
    model = make_model()

    async def commit(staged: Staged) -> float:
        """Runs on the event loop: it stops requests, copies in a thread, and goes on."""
        began = time.perf_counter()
        await asyncio.to_thread(load, receiver, model)
        trainer.send((staged.version, digest(model)))
        return time.perf_counter() - began

    async with (
        Engine(cluster_key=os.environ["KVXFER_CLUSTER_KEY"]) as engine,
        WeightReceiver(engine, wanted, instance_id="i0", commit=commit) as receiver,
    ):
        trainer.send(engine.address)
        await asyncio.to_thread(trainer.recv)  # the end


def load(receiver: WeightReceiver, model: nn.Module) -> None:
    """Copies what is staged into the model; parameters stay where they are."""
    memory = torch.frombuffer(receiver.memory, dtype=torch.uint8)
    parameters = model.state_dict()
    for name, (holding, offset, nbytes) in receiver.arena.places.items():
        box = memory[offset : offset + nbytes].view(getattr(torch, holding.dtype))
        parameters[name].copy_(box.view(holding.shape))


# --- training


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randint(1000, (64,))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    os.environ.setdefault("KVXFER_CLUSTER_KEY", secrets.token_hex(16))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    inference, theirs = mp.Pipe()
    wanted = state_of(model).holdings  # the whole model; one rank of several wants only its boxes
    server = mp.get_context("spawn").Process(target=serve, args=(theirs, wanted), daemon=True)
    server.start()
    address = inference.recv()

    def update(version: int, what: str) -> None:
        pushed = push(model, version, receivers=[address], wait_seconds=60)
        pushed.read()  # the next step may begin
        report = pushed.result()  # the instance serves the version
        same = inference.recv() == (version, digest(model))
        print(f"version {version}, {what}: {report.nbytes} bytes, {'equal' if same else 'WRONG'}")

    for version in (1, 2):
        step(model, optimizer)
        update(version, "after a step")

    # Other memory, as after offloading: the push follows.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 1
    update(3, "in other memory")

    # Another dtype is not what the instance expects: the push is refused, and it keeps 3.
    model.half()
    try:
        push(model, 4)
    except WeightsMismatch as error:
        print(f"version 4 is refused: {error}")
    model.float()
    update(4, "in float32 again")

    forget(model)
    inference.send("end")
    server.join()


if __name__ == "__main__":
    main()
