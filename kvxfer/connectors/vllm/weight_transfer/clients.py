"""A client of vLLM's HTTP routes that pauses it only while an update is applied."""

from __future__ import annotations

import contextlib
from typing import Literal

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

__all__ = ["PausingClient"]


class PausingClient(HTTPVLLMWeightSyncClient):
    """vLLM's own client, with /pause before /start_weight_update and /resume after
    /finish_weight_update. vLLM empties its prefix cache with the pause, so no KV of the old weights
    is used afterwards."""

    def __init__(
        self, base_url: str, mode: Literal["abort", "wait"] = "wait", timeout: float = 300
    ) -> None:
        """`mode`: "abort" aborts running requests, "wait" lets them end before the update."""
        super().__init__(base_url, timeout)
        self._mode = mode

    def start_weight_update(self) -> None:
        self._post(f"pause?mode={self._mode}")
        try:
            super().start_weight_update()
        except BaseException:
            self._resume()
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        try:
            super().finish_weight_update(weight_version)
        except BaseException:
            self._resume()
            raise
        self._post("resume")

    def _resume(self) -> None:
        with contextlib.suppress(Exception):  # the instance may have ended
            self._post("resume")
