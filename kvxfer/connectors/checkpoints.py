"""What the connectors tell of an engine's model: its weights and the settings of its config."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Final

from kvxfer.checkpoint_digest import digest_of_folder
from kvxfer.errors import InvalidArgument

logger = logging.getLogger(__name__)

_ROPE: Final = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def checkpoint_digest(model: str, revision: str | None, setting: str) -> str:
    """The digest of the weights of a model that the engine has loaded: a folder, or a name on
    Hugging Face's hub.

    Empty where it cannot be taken: a warning names the `setting` that takes its place.
    """
    try:
        return digest_of_folder(_folder_of(model, revision))
    except (OSError, ValueError, InvalidArgument) as error:
        logger.warning(
            "which weights this instance has cannot be told: %s; set %s to a name for them, which "
            "no other weights have",
            error,
            setting,
        )
        return ""


def rope_of(config: Any) -> str:
    """The settings of the rotary embedding of a Hugging Face config; empty where it has none."""
    rope = {name: value for name in _ROPE if (value := getattr(config, name, None)) is not None}
    return canonical(rope) if rope else ""


def canonical(value: Any) -> str:
    """JSON that is equal where the values are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    """What JSON does not know: sets, and enums of a config."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _folder_of(model: str, revision: str | None) -> Path:
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors"]
    return Path(
        snapshot_download(model, revision=revision, allow_patterns=patterns, local_files_only=True)
    )
