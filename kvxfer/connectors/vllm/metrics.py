"""The metrics of transfers in vLLM's own exposition, without the labels that vLLM adds to all."""

from __future__ import annotations

from typing import Final

from kvxfer.metric_set import Family

TRANSFERS: Final = Family(
    "vllm:kvxfer_transfers_total",
    "counter",
    "KV transfers that have ended, by outcome: delivered, or the error's code.",
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
    "Time from the prompt's first step (send) or the offer (receive) until the last byte arrived.",
    ("direction",),
)
FAMILIES: Final = (TRANSFERS, NBYTES, BLOCKS, SECONDS)
