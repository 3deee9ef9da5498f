"""The load of a vLLM instance: its scheduler counts, the worker that registers it reports."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from kvxfer.connectors.vllm.plan import Counted

if TYPE_CHECKING:
    from kvxfer.connectors.vllm.scheduler import Scheduled


class RequestCounter:
    """The requests and tokens of an engine. One thread: the engine's own loop."""

    def __init__(self) -> None:
        self._blocks: Callable[[], tuple[int, int]] | None = None
        self._prompts: dict[str, int] = {}
        self._running: set[str] = set()
        self._uncomputed: set[str] = set()
        self._requests = self._prompt_tokens = self._output_tokens = 0
        self._told: Counted | None = None

    def bind(self, blocks: Callable[[], tuple[int, int]]) -> None:
        """Takes a function that returns the numbers of free and of cached blocks."""
        self._blocks = blocks

    def arrived(self, request_id: str, prompt_tokens: int) -> None:
        self._prompts[request_id] = prompt_tokens
        self._uncomputed.add(request_id)
        self._requests += 1
        self._prompt_tokens += prompt_tokens

    def ended(self, request_id: str) -> None:
        prompt = self._prompts.pop(request_id, 0)
        if request_id in self._uncomputed:  # refused, or its client left
            self._uncomputed.remove(request_id)
            self._requests -= 1
            self._prompt_tokens -= prompt
        self._running.discard(request_id)

    def step(self, scheduled: Sequence[Scheduled], preempted: Collection[str]) -> Counted:
        """Returns the counts to report with the step that computes `scheduled`."""
        self._running.difference_update(preempted)
        for one in scheduled:
            prompt = self._prompts.get(one.request_id)
            if prompt is not None:
                self._running.add(one.request_id)
                if one.computed_tokens + one.step_tokens >= prompt:
                    self._output_tokens += 1
                    self._uncomputed.discard(one.request_id)
        self._told = self._now()
        return self._told

    @property
    def told(self) -> bool:
        """True if the last step has reported the current requests and blocks."""
        return self._told == self._now()

    def _now(self) -> Counted:
        free, cached = (None, None) if self._blocks is None else self._blocks()
        return Counted(
            running=len(self._running),
            waiting=len(self._prompts) - len(self._running),
            free_blocks=free,
            cached_blocks=cached,
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
        )
