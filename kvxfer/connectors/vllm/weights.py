"""The call that follows an in-place update of a vLLM instance's weights."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from kvxfer.connectors.vllm.connector import KvxferConnector
from kvxfer.errors import InvalidArgument

__all__ = ["set_weights_version"]


def set_weights_version(_worker: Any, version: int) -> None:
    """Reports to the control plane and every peer that the weights have another version. Call it on
    all workers, `llm.collective_rpc(set_weights_version, args=(version,))`, when the new weights
    are loaded and before the instance serves requests again.

    Transfers of the previous version are cancelled, and so are prompts that wait to be fetched. An
    instance exchanges KV only with instances of the same version. The prefix cache is vLLM's: call
    `reset_prefix_cache()` to empty it.

    Raises InvalidArgument if the version is not greater than the previous one, or if the instance
    has no KvxferConnector.
    """
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if not isinstance(connector, KvxferConnector):
        raise InvalidArgument(
            "this vLLM instance has no KvxferConnector; only with one it has a weights version"
        )
    connector.set_weights_version(version)
