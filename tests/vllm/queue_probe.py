"""Checks that vLLM's queue signals each message to its reader, however soon after the last one,
when readers sleep with the plugin: `python queue_probe.py`, in vLLM's environment."""

from __future__ import annotations

import os

import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils.network_utils import get_open_zmq_ipc_path

from kvxfer.connectors.vllm.quiet_queue import VARIABLE, register

MESSAGES = 200
LOST_MS = 1000

os.environ[VARIABLE] = "0"
register()
context, address = zmq.Context(), get_open_zmq_ipc_path()
writer = shm_broadcast.SpinCondition(is_reader=False, context=context, notify_address=address)
reader = shm_broadcast.SpinCondition(is_reader=True, context=context, notify_address=address)
while not reader.poller.poll(1):  # until it is connected
    writer.notify()
told = 0
for _ in range(MESSAGES):
    reader.wait()
    writer.notify()
    told += bool(reader.poller.poll(LOST_MS))
assert told == MESSAGES, f"told of {told}"
print(f"told of {told} messages")
context.destroy(linger=0)
