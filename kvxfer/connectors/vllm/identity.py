"""What vLLM's KV cache is of, as both sides of a transfer compare it."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vllm.lora.utils import get_adapter_absolute_path

from kvxfer.checkpoint_digest import digest_of_folder
from kvxfer.connectors.checkpoints import canonical, checkpoint_digest, rope_of
from kvxfer.errors import InvalidArgument
from kvxfer.model_identity import ModelIdentity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

_CONNECTOR: Final = "vllm/1"
# What of an adapter's config decides on K and V; the rest is about its training.
_LORA: Final = ("r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern")
_ADAPTERS_KNOWN: Final = 4096


def identity_of(config: VllmConfig, checkpoint: str | None, instance_id: str) -> ModelIdentity:
    """The identity of an instance's model. `checkpoint` is the name that an operator gives its
    weights; None takes their digest."""
    model, window = config.model_config, config.model_config.get_sliding_window()
    if checkpoint is None and config.load_config.load_format == "dummy":
        checkpoint = f"dummy:{model.seed}"
    if checkpoint is None:
        setting = "kv_connector_extra_config.checkpoint"
        checkpoint = checkpoint_digest(model.model, model.revision, setting)
    # Scales of the checkpoint are among its tensors; what an instance finds by itself is its own.
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


def adapter_of(request: LoRARequest | None) -> str:
    """What names the adapter of a request: a digest of its weights and what scales them, or its
    name where that cannot be taken. Empty for none."""
    if request is None:
        return ""
    try:
        folder = Path(get_adapter_absolute_path(request.lora_path))
        return _adapter_digest(folder, max(file.stat().st_mtime for file in folder.iterdir()))
    except (OSError, ValueError, InvalidArgument) as error:
        logger.warning("adapter %s goes by its name: %s", request.lora_name, error)
        return f"name:{request.lora_name}"


@lru_cache(_ADAPTERS_KNOWN)
def _adapter_digest(folder: Path, _modified: float) -> str:
    config = json.loads((folder / "adapter_config.json").read_bytes())
    scaling = canonical({name: config.get(name) for name in _LORA})
    both = digest_of_folder(folder) + scaling
    return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()
