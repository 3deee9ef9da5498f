"""Kernels in Triton for KV caches in GPU memory: runs copied between pools, heads reordered, pages
hashed.

They take a base and byte offsets, never a table of addresses, and are queued on the current stream.
Needs Triton. With TRITON_INTERPRET=1 they run on the CPU, on tensors in host memory.
"""

from kvxfer.kernels.checksum import checksum_runs
from kvxfer.kernels.head_order import permute_heads
from kvxfer.kernels.runs import copy_runs

__all__ = ["checksum_runs", "copy_runs", "permute_heads"]
