"""The digest that names a request of vLLM on both sides."""

from types import SimpleNamespace
from typing import Any

from kvxfer.connectors.vllm.identity import digest_of


def request(*images: str, tokens: tuple[int, ...] = (1, 2), adapter: str = "") -> Any:
    return SimpleNamespace(
        prompt_token_ids=tokens,
        mm_features=[SimpleNamespace(identifier=name) for name in images],
        lora_request=SimpleNamespace(lora_name=adapter) if adapter else None,
    )


def test_tokens_and_images_are_in_the_digest_and_the_name_of_an_adapter_is_not() -> None:
    assert digest_of(request(adapter="blue")) == digest_of(request(adapter="v2/blue"))
    others = [request(), request(tokens=(2, 1)), request("cat"), request("cat", "dog")]
    assert len({digest_of(each) for each in others}) == len(others)
