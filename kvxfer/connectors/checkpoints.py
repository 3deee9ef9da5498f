"""The identity of an engine's model: its weights, adapters and rotary embedding."""

from __future__ import annotations

import hashlib
import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvxfer.checkpoint_digest import digest_of_folder
from kvxfer.errors import InvalidArgument

logger = logging.getLogger(__name__)

# The settings of an adapter that affect K and V; the others concern its training.
_LORA: Final = ("r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern")
_ADAPTERS_KNOWN: Final = 4096
_WEIGHTS: Final = "*.safetensors"
_ADAPTER_CONFIG: Final = "adapter_config.json"
_ROPE: Final = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def checkpoint_digest(model: str, revision: str | None, setting: str) -> str:
    """Returns the digest of the weights of the loaded model: a folder, or a name on Hugging Face's
    hub.

    Returns "" if it cannot be computed, and logs a warning that names the `setting` to use instead.
    """
    try:
        return digest_of_folder(_folder_of(model, revision, _WEIGHTS))
    except (OSError, ValueError, InvalidArgument) as error:
        logger.warning(
            "the digest of this instance's weights cannot be computed: %s; set %s to a name that "
            "no other weights have",
            error,
            setting,
        )
        return ""


def adapter_of(name: str, model: str) -> str:
    """Returns the identity of a request's LoRA adapter: a digest of its weights and their scaling,
    or its name if that cannot be computed. `model` is a folder, or a name on Hugging Face's hub."""
    try:
        folder = _folder_of(model, None, _WEIGHTS, _ADAPTER_CONFIG)
        return _adapter_digest(folder, max(file.stat().st_mtime for file in folder.iterdir()))
    except (OSError, ValueError, InvalidArgument) as error:
        logger.warning("adapter %s is identified by its name: %s", name, error)
        return f"name:{name}"


@lru_cache(_ADAPTERS_KNOWN)
def _adapter_digest(folder: Path, _modified: float) -> str:
    config = json.loads((folder / _ADAPTER_CONFIG).read_bytes())
    scaling = canonical({name: config.get(name) for name in _LORA})
    both = digest_of_folder(folder) + scaling
    return hashlib.blake2b(both.encode(), digest_size=16).hexdigest()


def rope_of(config: Any) -> str:
    """Returns the rotary embedding's settings of a Hugging Face config as JSON; "" without any."""
    rope = {name: value for name in _ROPE if (value := getattr(config, name, None)) is not None}
    return canonical(rope) if rope else ""


def canonical(value: Any) -> str:
    """Returns JSON that is equal for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """Converts values that JSON lacks: sets, and enums of a config."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _folder_of(model: str, revision: str | None, *patterns: str) -> Path:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model, revision=revision, allow_patterns=list(patterns), local_files_only=True
        )
    )
