"""Kernels in Triton for KV caches in GPU memory: attention over their blocks, new tokens stored,
runs copied between pools, heads reordered, pages hashed.

They take a base and offsets, never a table of addresses, and are queued on the current stream.
Needs Triton. With TRITON_INTERPRET=1 they run on the CPU, on tensors in host memory.
"""

from kvxfer.kernels.checksum import checksum_runs
from kvxfer.kernels.head_order import permute_heads
from kvxfer.kernels.paged_attention import paged_attention
from kvxfer.kernels.runs import copy_runs
from kvxfer.kernels.store_tokens import store_tokens

__all__ = ["checksum_runs", "copy_runs", "paged_attention", "permute_heads", "store_tokens"]
