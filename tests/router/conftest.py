"""The network of virtual tests; and a model that real workers run, also loaded in the test's own
process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
import transformers

from kvxfer.reference.kv_cache import PagedKvCache
from kvxfer.reference.runner import BLOCK_SIZE, ModelRunner, load_model
from kvxfer.scheduler.embedded import EmbeddedRegistry
from tests.network import Network

from .cluster import BLOCKS
from .completions import MODEL


@pytest.fixture
async def control_plane(network: Network) -> AsyncIterator[EmbeddedRegistry]:
    """The registry of a control plane where no lease ends."""
    async with network.control_plane(lease_seconds=600) as registry:
        yield registry


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / MODEL
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.2,
        )
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def single(model: Path) -> ModelRunner:
    """The same model in this process."""
    torch.set_num_threads(1)
    llama, tokenizer = load_model(model)
    return ModelRunner(llama, tokenizer, PagedKvCache(llama.config, BLOCKS, BLOCK_SIZE))
