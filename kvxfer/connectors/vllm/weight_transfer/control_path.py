"""vLLM's own control path, over which all its workers pin an update and apply it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient

PIN: Final = "pin"
"""The action that pins what this worker has staged: it will apply that, and nothing drops it."""
UNPIN: Final = "unpin"
"""The action that drops what is pinned: finishing applies nothing."""


class ControlPath:
    """A control path to all workers of vLLM, by which they pin an update and apply it."""

    def __init__(self, client: VLLMWeightSyncClient) -> None:
        self._client = client

    def pin(self, update_id: str, version: int) -> None:  # noqa: ARG002 (all paths take a version)
        self._client.start_weight_update()
        self._client.update_weights({"action": PIN, "update_id": update_id})

    def commit(self, update_id: str, version: int) -> None:  # noqa: ARG002
        self._client.finish_weight_update(str(version))

    def unpin(self, update_id: str) -> None:
        # The worker that reported the refusal has no update under way any more.
        self._client.start_weight_update()
        try:
            self._client.update_weights({"action": UNPIN, "update_id": update_id})
        finally:
            self._client.finish_weight_update()
