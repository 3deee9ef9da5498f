"""How all workers of vLLM pin an update and apply it: vLLM's own control path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

PIN: Final = "pin"
"""Action of an update: what this worker has staged is what it will apply; nothing drops it."""
UNPIN: Final = "unpin"
"""Whatever is pinned is dropped, and finishing applies nothing."""


class ControlPath:
    """Has all workers of vLLM pin an update and apply it, over vLLM's own control path."""

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self._client = client

    def pin(self, update_id: str, version: int) -> None:  # noqa: ARG002 (all paths take a version)
        self._client.start_weight_update()
        self._client.update_weights({"action": PIN, "update_id": update_id})

    def commit(self, update_id: str, version: int) -> None:  # noqa: ARG002
        self._client.finish_weight_update(str(version))

    def unpin(self, update_id: str) -> None:
        # The worker that told of the refusal thinks that no update is under way any more.
        self._client.start_weight_update()
        try:
            self._client.update_weights({"action": UNPIN, "update_id": update_id})
        finally:
            self._client.finish_weight_update()
