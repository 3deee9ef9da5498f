"""The bodies of a worker's HTTP API: OpenAI's completions, with what a KV transfer adds."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvxfer.instances import Role


class KvTransferParams(BaseModel):
    """The control plane's answer for the transfer; a router gives both sides the same. Unknown
    members, from newer routers, are ignored."""

    model_config = ConfigDict(extra="ignore")

    ticket: str
    prefill_engine_address: str = Field(description="The engine that decode offers its blocks to.")
    prefill_rank_addresses: list[str] = Field(
        [], description="The engine of each prefill rank, if there is more than one."
    )
    handshake: Literal["direct", "brokered"] = Field(
        "direct",
        description="Direct: decode connects to prefill and sends its block table. Brokered: "
        "prefill connects to decode, and the control plane passes the block table on.",
    )
    decode_engine_address: str | None = Field(
        None, description="The engine that prefill connects to in a brokered handshake."
    )
    do_remote_prefill: bool = Field(
        False, description="The parameter of vLLM that routers send to decode; ignored here."
    )
    do_remote_decode: bool = Field(False, description="The same for prefill.")

    @model_validator(mode="after")
    def _address_of_decode(self) -> Self:
        if self.handshake == "brokered" and self.decode_engine_address is None:
            raise ValueError("a brokered handshake needs decode_engine_address")
        return self

    @property
    def prefill_dials(self) -> str | None:
        """The address that the prefill worker connects to, if it does."""
        return self.decode_engine_address if self.handshake == "brokered" else None

    @property
    def decode_dials(self) -> str | list[str] | None:
        """The address that the decode worker connects to, or those of all ranks, if it does."""
        if self.handshake != "direct":
            return None
        return self.prefill_rank_addresses or self.prefill_engine_address


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = Field(False, description="One more event, with usage and timings.")


class RequestBody(BaseModel):
    """The members that completions and chats have in common."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = Field(None, description="If given, it must be the worker's model.")
    max_tokens: int = Field(16, ge=1)
    ignore_eos: bool = False
    temperature: Literal[0] = 0
    n: Literal[1] = 1
    stream: bool = Field(False, description="Decode only: an event per token.")
    stream_options: StreamOptions | None = None
    return_token_ids: bool = Field(
        False,
        description="The first event of a stream has prompt_token_ids. Answers always have "
        "token_ids.",
    )
    weights_version: int | None = Field(
        None, ge=0, description="Answer only with this version of the weights."
    )
    kv_transfer_params: KvTransferParams


class CompletionRequest(RequestBody):
    """A request for the greedy completion of one prompt. Unsupported options are refused, not
    ignored."""

    prompt: str | list[int] = Field(description="Text, or token ids.")


class Choice(BaseModel):
    index: int = 0
    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TransferStats(BaseModel):
    """The KV cache that was moved for a request."""

    fabric: str
    bytes: int
    pages: int = Field(description="KV blocks, counted per layer and per plane (K, V).")
    writes: int = Field(description="One-sided writes of the pages; neighbouring pages share one.")
    seconds: float = Field(
        description="Time for which writes were under way, including those of other requests at "
        "that time."
    )


class PrefillTimings(BaseModel):
    """Durations in seconds."""

    prefill: float = Field(description="Computation of the prompt, until the first token is known.")
    send: float = Field(description="Time after that until every byte was delivered to decode.")


class DecodeTimings(BaseModel):
    """Durations in seconds. `visible_transfer` compares the clocks of two workers."""

    prefill: float = Field(description="The prefill worker's measurement.")
    visible_transfer: float = Field(
        description="Time from the end of prefill's computation until the cache was complete here."
    )
    first_token: float = Field(description="Time from the request's arrival to the first token.")
    decode: float = Field(description="Time for all tokens after the first.")


class VersionOfTokens(BaseModel):
    """Consecutive tokens of an answer that one version of the weights computed."""

    version: int
    first: int = Field(description="Index of the first of them in the answer.")
    tokens: int = Field(description="The number of tokens.")


class Completion(BaseModel):
    id: str = Field(description="cmpl-, or chatcmpl- for a chat, and the request id.")
    object: Literal["text_completion"] = "text_completion"
    created: int = Field(description="Seconds since the Unix epoch.")
    model: str
    weights_version: int = Field(default=0, description="The version of the last token.")
    choices: list[Choice]
    usage: Usage


class PrefillCompletion(Completion):
    """One token: the first, which also goes to the decode worker."""

    transfer: TransferStats
    timings: PrefillTimings


class DecodeCompletion(Completion):
    """All tokens, including the first."""

    weights_versions: list[VersionOfTokens] = Field(
        default=[], description="More than one only if updates keep running requests."
    )
    timings: DecodeTimings


class ChunkChoice(BaseModel):
    index: int = 0
    text: str = Field(description="May be empty: a character can take several tokens.")
    token_ids: list[int]
    prompt_token_ids: list[int] | None = Field(
        default=None, description="Present in the first event if return_token_ids is set."
    )
    finish_reason: Literal["stop", "length"] | None = None


class CompletionChunk(BaseModel):
    """One event of a stream: a token, or at the end usage, timings and versions without one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    weights_version: int = Field(
        default=0, description="The version of the token, or of the last one."
    )
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: DecodeTimings | None = None
    weights_versions: list[VersionOfTokens] | None = Field(
        default=None, description="Present at the end, with the usage, as in a whole answer."
    )


class Health(BaseModel):
    """The answer of a healthy worker."""

    status: Literal["ok"] = "ok"
    role: Role
    model: str
    blocks: int = Field(description="KV blocks in all.")
    free_blocks: int
    running: int = Field(description="Requests under way.")
    weights_version: int = Field(description="The version served now; 0 before the first update.")
    weights_address: str | None = Field(
        None, description="The address for a coordinator of weight updates, if they are taken."
    )
