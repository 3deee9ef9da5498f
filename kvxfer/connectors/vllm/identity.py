"""The identity of vLLM's model and of a request, which both sides of a transfer compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvxfer.connectors.checkpoints import checkpoint_digest, rope_of
from kvxfer.model_identity import ModelIdentity
from kvxfer.prompt_digest import prompt_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_CONNECTOR: Final = "vllm/1"


def identity_of(config: VllmConfig, checkpoint: str | None, instance_id: str) -> ModelIdentity:
    """Returns the identity of an instance's model. `checkpoint` is the operator's name for its
    weights; None takes their digest."""
    model, window = config.model_config, config.model_config.get_sliding_window()
    if checkpoint is None and config.load_config.load_format == "dummy":
        checkpoint = f"dummy:{model.seed}"
    if checkpoint is None:
        setting = "kv_connector_extra_config.checkpoint"
        checkpoint = checkpoint_digest(model.model, model.revision, setting)
    # Scales of the checkpoint are among its tensors; scales that an instance finds are its own.
    own_scales = getattr(config.cache_config, "calculate_kv_scales", False)
    return ModelIdentity(
        checkpoint=checkpoint,
        model_dtype=str(model.dtype).removeprefix("torch."),
        quantization=str(model.quantization or ""),
        kv_scales=instance_id if own_scales else "",
        rope=rope_of(model.hf_text_config),
        sliding_window="" if window is None else str(window),
        connector=_CONNECTOR,
    )


def digest_of(request: Request) -> bytes:
    """Returns a digest of a request's prompt. The name of its adapter is not included: servers may
    have different names for the same weights, whose digests are compared."""
    return prompt_digest(
        request.prompt_token_ids or (), *(feature.identifier for feature in request.mm_features)
    )
