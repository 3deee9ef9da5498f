"""The metrics of transfers in vLLM's own exposition, beside the labels that vLLM gives to all."""

from __future__ import annotations

from typing import Final

from kvxfer.metric_set import Family

TRANSFERS: Final = Family(
    "vllm:kvxfer_transfers_total",
    "counter",
    "KV transfers that have ended, by how: delivered, or the error's code.",
    ("direction", "outcome"),
)
NBYTES: Final = Family(
    "vllm:kvxfer_transfer_bytes_total",
    "counter",
    "Bytes of KV cache in transfers that were delivered.",
    ("direction",),
)
BLOCKS: Final = Family(
    "vllm:kvxfer_transfer_blocks_total",
    "counter",
    "KV blocks in transfers that were delivered.",
    ("direction",),
)
SECONDS: Final = Family(
    "vllm:kvxfer_transfer_seconds",
    "histogram",
    "From the first step of the prompt (send) or the offer (receive) until the last byte is there.",
    ("direction",),
)
FAMILIES: Final = (TRANSFERS, NBYTES, BLOCKS, SECONDS)
