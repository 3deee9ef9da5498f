"""A fleet of instances that exist only in the registry, and requests of instances and routers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from benchmarks.control.generator import Answers, request

MODEL: Final = "llama"
PROMPT_TOKENS: Final = 1900
_BLOCKS: Final = 8192
_PER_HOST, _HOSTS_PER_RACK, _ZONES = 8, 16, 3

OPEN_TRANSFER: Final = request(
    "POST", "/v1/transfers", {"model": MODEL, "prompt_tokens": PROMPT_TOKENS}
)


def register(index: int) -> bytes:
    """Returns the registration of instance `index`: every second one prefill, eight to a host, in
    racks and zones."""
    host = index // _PER_HOST
    labels = {
        "zone": f"zone-{host % _ZONES}",
        "rack": f"rack-{host // _HOSTS_PER_RACK}",
        "host": f"host-{host}",
    }
    body: dict[str, Any] = {
        "instance_id": instance_id(index),
        "role": "prefill" if index % 2 else "decode",
        "model": MODEL,
        "engine_address": f"kvx://10.{host >> 8}.{host & 255}.1:7400/{index:032x}",
        "http_address": f"http://10.{host >> 8}.{host & 255}.1:{8000 + index % _PER_HOST}",
        "layout": {
            "num_layers": 80,
            "num_kv_heads": 8,
            "head_size": 128,
            "dtype": "bfloat16",
            "block_size": 16,
        },
        "num_blocks": _BLOCKS,
        "labels": labels,
        "state": "ready",
    }
    return request("POST", "/v1/instances", body)


def heartbeats(epochs: dict[str, int]) -> list[bytes]:
    """Returns one heartbeat of each instance, with the load of a busy worker."""
    return [
        request(
            "PUT",
            f"/v1/instances/{name}/heartbeat",
            {"epoch": epoch, "load": {"running": index % 5, "free_blocks": _BLOCKS - index % 999}},
        )
        for index, (name, epoch) in enumerate(epochs.items())
    ]


def epochs(leases: Answers) -> dict[str, int]:
    """Returns the epoch of each instance, from the answers to the registrations."""
    decoded = (msgspec.json.decode(body) for body in leases.bodies)
    return {lease["instance_id"]: lease["epoch"] for lease in decoded if "instance_id" in lease}


def releases(opened: Iterable[bytes]) -> list[bytes]:
    """Returns the requests that give back the transfers of these answers."""
    return [
        request("DELETE", f"/v1/transfers/{msgspec.json.decode(body)['transfer_id']}")
        for body in opened
    ]


def instance_id(index: int) -> str:
    return f"worker-{index:05}"
