"""Pull, the protocol of vLLM's own proxies: prefill keeps a prompt, and decode fetches it later.

Prefill signs the ticket itself when the prompt is computed, and the reply to the proxy carries it.
From then on it is a push that waits for its OFFER: decode's side is the same for both.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.connectors.vllm.plan import Send, TransferParams
from kvxfer.connectors.vllm.prompt_blocks import PromptBlocks
from kvxfer.connectors.vllm.samples import EndedSamples
from kvxfer.ticket import Ticket, TicketKeys, sign_ticket

# The longest time that decode can have a prompt kept, by KEEP messages while its request waits.
_MOST_LEASES: Final = 10


def is_pull(params: Mapping[str, Any] | None) -> bool:
    """True if prefill is asked to keep a prompt that will be fetched."""
    return params is not None and bool(params.get("do_remote_decode")) and "ticket" not in params


@dataclass(frozen=True, slots=True)
class Source:
    """A prefill instance as decode finds it: the epoch of its first registration, and the engine
    address of each of its ranks, in their order."""

    epoch: int
    addresses: tuple[str, ...]


@dataclass(slots=True)
class _Prompt:
    tokens: int
    digest: bytes
    adapter: str


class KeptPrompts:
    """The prompts that an instance computes to be fetched. One thread: the engine's own loop.

    The samples of one request (`n` above 1) are separate requests, and each of them has the same
    prompt in its blocks. The proxy gets one reply, so the first one's blocks are kept for all.
    """

    source: Source

    def __init__(
        self,
        instance_id: str,
        blocks: PromptBlocks,
        lease_seconds: float,
        ticket_keys: Callable[[], TicketKeys],
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._instance_id = instance_id
        self._blocks = blocks
        self._lease_seconds = lease_seconds
        self._ticket_keys = ticket_keys
        self._clock = clock
        self._prompts: dict[str, _Prompt] = {}
        self._replies: EndedSamples[dict[str, Any]] = EndedSamples(lease_seconds, clock=clock)

    def __len__(self) -> int:
        return len(self._prompts)

    def arrived(
        self, request_id: str, prompt_tokens: int, digest: bytes, adapter: str = ""
    ) -> None:
        self._prompts[request_id] = _Prompt(prompt_tokens, digest, adapter)

    def tokens(self, request_id: str) -> int | None:
        """Returns the number of tokens of a prompt that is to be kept, else None."""
        prompt = self._prompts.get(request_id)
        return None if prompt is None else prompt.tokens

    def finished(
        self, request_id: str, block_ids: Sequence[Sequence[int]], *, computed: bool
    ) -> tuple[Send | None, dict[str, Any] | None]:
        """Returns what the worker side keeps, and the reply to the proxy, when a request has ended;
        None for both if its prompt is not computed."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is None or not computed:
            return None, None
        if (reply := self._replies.of(request_id, prompt.digest)) is not None:
            return None, reply
        send, reply = self._keep(request_id, prompt, block_ids)
        self._replies.add(request_id, prompt.digest, reply)
        return send, reply

    def _keep(
        self, request_id: str, prompt: _Prompt, block_ids: Sequence[Sequence[int]]
    ) -> tuple[Send, dict[str, Any]]:
        now = self._clock.unix()
        ticket = Ticket(
            transfer_id=uuid.uuid4().hex,
            request_id=request_id,
            prefill_id=self._instance_id,
            prefill_epoch=self.source.epoch,
            decode_id="",
            decode_epoch=0,
            expires_at=now + _MOST_LEASES * self._lease_seconds,
            issued_at=now,
            prompt_digest=prompt.digest,
            adapter=prompt.adapter,
        )
        addresses = self.source.addresses
        params = TransferParams(sign_ticket(ticket, self._ticket_keys()), addresses[0], addresses)
        total = self._blocks.count(prompt.tokens)
        table = self._blocks.table(block_ids, prompt.tokens)
        send = Send(request_id, params, prompt.digest, total, table, total, prompt.adapter)
        engine = urlsplit(addresses[0])
        return send, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "ticket": params.ticket,
            "prefill_engine_address": params.prefill_engine_address,
            "prefill_rank_addresses": list(addresses),
            # Proxies may read these; decode trusts the ticket alone.
            "remote_engine_id": self._instance_id,
            "remote_request_id": request_id,
            "remote_host": engine.hostname,
            "remote_port": engine.port,
            "tp_size": len(addresses),
        }
