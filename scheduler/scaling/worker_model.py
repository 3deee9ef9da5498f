"""The speed of a worker, for fleets on paper (`paper_fleet`) and for `kvxfer simulate`."""

from __future__ import annotations

import math
from typing import Final

import msgspec

BLOCK_TOKENS: Final = 16


class WorkerModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speed of one worker. The defaults are of the order of an 8B model on one H100."""

    prefill_tokens_per_second: float = 20_000.0
    """Tokens/s of a prefill instance."""
    prefill_overhead: float = 0.0
    """Further seconds of a prompt, whatever its length."""
    itl_base: float = 0.008
    """Seconds of a decode step."""
    itl_per_request: float = 0.0004
    """Seconds more per request in the batch."""
    batch: int = 256
    """The most requests in a batch."""
    kv_blocks: int = 20_000
    """KV blocks of 16 tokens."""
    start_seconds: float = 60.0
    """Seconds from the request for a worker until it is ready, when scaling."""
    # The members below count in `kvxfer simulate` alone.
    kv_bytes_per_token: float = 131_072.0
    """Bytes of KV cache per token."""
    nics: int = 1
    """NICs of an instance."""
    nic_gb_per_second: float = 42.5
    """GB/s of a NIC."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "prefill_overhead":
                if not 0 <= value < math.inf:
                    raise ValueError(f"{name} is {value}; write a number, 0 or more")
            elif not 0 < value < math.inf:
                raise ValueError(f"{name} is {value}; write a number above 0")

    def prefill_seconds(self, tokens: float) -> float:
        """Returns the seconds that one prompt takes by itself."""
        return self.prefill_overhead + tokens / self.prefill_tokens_per_second

    def itl(self, batch: float) -> float:
        """Returns the seconds per token in a batch of `batch` requests."""
        return self.itl_base + self.itl_per_request * batch
