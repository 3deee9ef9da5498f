"""The requests of a worker: prefill sends the KV cache that it computes, decode continues from the
one that it receives.

Blocks are owned by `with` statements throughout. An answer, an error and a cancellation all free
every block of the request, and only after its computation and transfer have ended.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Literal

from kvxfer.errors import InvalidArgument
from kvxfer.instances import Load, Role
from kvxfer.kv import BlockPool, KvCache, KvEndpoint, PrefillSession
from kvxfer.load_meter import LoadMeter
from kvxfer.prompt_digest import prompt_digest
from kvxfer.reference.compute import Abandon, ComputeThread
from kvxfer.reference.runner import ModelRunner
from kvxfer.reference.versions import Admission, VersionGate
from kvxfer.reference.worker.completions import (
    Choice,
    ChunkChoice,
    Completion,
    CompletionChunk,
    CompletionRequest,
    DecodeCompletion,
    DecodeTimings,
    Health,
    PrefillCompletion,
    PrefillTimings,
    TransferStats,
    Usage,
    VersionOfTokens,
)
from kvxfer.reference.worker.gpu_blocks import GpuBlocks
from kvxfer.reference.worker.metered_engine import MeteredEngine
from kvxfer.reference.worker.stream_order import StreamOrder
from kvxfer.reference.worker.tail import Tail, decode_tail, encode_tail
from kvxfer.reference.worker.text_stream import TextStream, text_after
from kvxfer.reference.worker.tokenization import Tokenized, TokenizeRequest
from kvxfer.tracing.span import span
from kvxfer.worker_metrics import WorkerMetrics


@dataclass(slots=True)
class _Decoding:
    """A decode, except its tokens. Members with defaults are set at its first token."""

    arrived: float
    admission: Admission
    request_id: str = ""
    created: int = 0
    prompt: list[int] = field(default_factory=list)
    prefill: float = 0.0
    visible_transfer: float = 0.0
    first_token_at: float = 0.0

    def timings(self, now: float) -> DecodeTimings:
        return DecodeTimings(
            prefill=self.prefill,
            visible_transfer=self.visible_transfer,
            first_token=self.first_token_at - self.arrived,
            decode=now - self.first_token_at,
        )


class WorkerService:
    """One worker's model, blocks and transfers. Loop only; the model runs in `compute`.

    A request is served on the side that its ticket names, so `role` may change while requests of
    the previous role are under way.
    """

    def __init__(
        self,
        role: Role,
        runner: ModelRunner,
        cache: KvCache,
        pool: BlockPool,
        endpoint: KvEndpoint,
        engine: MeteredEngine,
        compute: ComputeThread,
        on_gpu: GpuBlocks | StreamOrder | None = None,
        gate: VersionGate | None = None,
    ) -> None:
        """`on_gpu`, if the cache is on a GPU: the copies if the model computes on the processor, or
        the order of the stream that it computes on. `gate` is that of weight updates."""
        self.role, self.runner = role, runner
        self._pool = pool
        self._layout = cache.layout
        self._endpoint = endpoint
        self._engine = engine
        self._compute = compute
        self._on_gpu = on_gpu
        self._gate = gate or VersionGate(compute, clock=endpoint.clock)
        self.weights_address: str | None = None
        """The address that weight updates are sent to, if they are taken."""
        self._metrics = WorkerMetrics(engine, endpoint)
        self._requests = 0
        self._clock = endpoint.clock
        self._meter = LoadMeter(clock=self._clock)
        self.on_end: Callable[[], None] = lambda: None
        """Called when a request has ended, and its blocks are free."""

    def load(self) -> Load:
        """Returns the load that this worker reports to the control plane."""
        return Load(
            running=self._requests,
            free_blocks=self._pool.num_free,
            requests_per_second=self._meter.requests_per_second,
            tokens_per_second=self._meter.tokens_per_second,
            ttft_p90=self._meter.ttft_p90,
            itl_p90=self._meter.itl_p90,
            sent=self._endpoint.traffic(),
        )

    def tokenize(self, request: TokenizeRequest) -> Tokenized:
        """Returns the tokens of a prompt. Raises InvalidArgument."""
        self._require_model(request.model)
        tokens = self.runner.encode(request.text())
        return Tokenized(
            tokens=tokens, count=len(tokens), max_model_len=self.runner.config.max_position
        )

    def take_role(self, role: Role) -> None:
        """Takes the role that the control plane assigns; requests of the previous role continue."""
        self.role = role

    def health(self) -> Health:
        return Health(
            role=self.role,
            model=self.runner.config.name,
            blocks=self._pool.num_blocks,
            free_blocks=self._pool.num_free,
            running=self._requests,
            weights_version=self._gate.version,
            weights_address=self.weights_address,
        )

    def metrics(self) -> bytes:
        """Returns the metrics in Prometheus' format."""
        return self._metrics.render()

    async def complete(self, request: CompletionRequest) -> Completion:
        """Answers a request with this worker's side of it.

        Raises InvalidArgument, PromptTooLong, BlockPoolExhausted, and everything that
        `KvEndpoint` and its sessions raise; WrongVersion and RequestAborted as `VersionGate` does.
        """
        async with self._serving(request) as (side, admission):
            if side is Role.PREFILL:
                return await self._prefill(request, admission)
            run = _Decoding(self._clock.monotonic(), admission)
            async with contextlib.aclosing(self._decode(request, run)) as tokens:
                output = [token async for token in tokens]
            return DecodeCompletion(
                id=_id(run.request_id),
                created=run.created,
                model=self.runner.config.name,
                weights_version=admission.spans[-1].version,
                weights_versions=_versions(admission),
                choices=[self._choice(run.prompt, output, request)],
                usage=_usage(run.prompt, output),
                timings=run.timings(self._clock.monotonic()),
            )

    async def stream(self, request: CompletionRequest) -> AsyncGenerator[CompletionChunk, None]:
        """Yields the answer of a decode worker, token by token; each is computed when it is
        requested. Raises what complete() raises."""
        async with self._serving(request) as (side, admission):
            if side is Role.PREFILL:
                raise InvalidArgument(
                    "stream: prefill answers with one token, not a stream; stream from decode"
                )
            run = _Decoding(self._clock.monotonic(), admission)
            output: list[int] = []
            text: TextStream | None = None
            async with contextlib.aclosing(self._decode(request, run)) as tokens:
                async for token in tokens:
                    output.append(token)
                    text = text or TextStream(self.runner.tokenizer, run.prompt)
                    reason = self._finish_reason(output, request)
                    said = text.push(token) + (text.flush() if reason else "")
                    choice = ChunkChoice(text=said, token_ids=[token], finish_reason=reason)
                    if request.return_token_ids and len(output) == 1:
                        choice.prompt_token_ids = run.prompt
                    yield self._chunk(run, choice)
            if request.stream_options is not None and request.stream_options.include_usage:
                end = self._chunk(run)
                end.usage = _usage(run.prompt, output)
                end.timings = run.timings(self._clock.monotonic())
                end.weights_versions = _versions(admission)
                yield end

    @contextlib.asynccontextmanager
    async def _serving(self, request: CompletionRequest) -> AsyncIterator[tuple[Role, Admission]]:
        """Yields the side that a request is for, once no update delays it; counts it meanwhile."""
        self._require_model(request.model)
        self._requests += 1
        try:
            async with self._gate.admit(request.weights_version) as admission:
                yield (
                    self._endpoint.side(request.kv_transfer_params.ticket) or self.role,
                    admission,
                )
        finally:
            self._requests -= 1
            self.on_end()

    def _require_model(self, asked: str | None) -> None:
        model = self.runner.config.name
        if asked not in (None, model):
            raise InvalidArgument(f"this worker runs the model {model!r}, not {asked!r}")

    async def _prefill(self, request: CompletionRequest, admission: Admission) -> PrefillCompletion:
        tokens = self.runner.encode(request.prompt)
        num_blocks = self.runner.blocks_for(len(tokens), max_tokens=1)
        params = request.kv_transfer_params
        busy_before = self._engine.busy_seconds()
        with self._pool.hold(num_blocks) as hold:
            async with self._endpoint.prefill_session(
                params.ticket, hold, decode_address=params.prefill_dials
            ) as session:
                abandon = Abandon()
                with self._meter.request(len(tokens)):
                    tail = await self._compute.run(
                        lambda: self._compute_prompt(
                            tokens, hold.ids.tolist(), session, abandon, admission
                        ),
                        abandon,
                        waits="prefill.wait",
                    )
                await session.finish(encode_tail(tail))
                sent_at = self._clock.unix()
        output = [tail.first_token]
        return PrefillCompletion(
            id=_id(session.request_id),
            created=int(sent_at),
            model=self.runner.config.name,
            weights_version=tail.weights_version,
            choices=[self._choice(tokens, output, request)],
            usage=_usage(tokens, output),
            transfer=TransferStats(
                fabric=session.fabric or "",
                bytes=session.nbytes,
                pages=num_blocks * self._layout.layers_per_rank * len(self._layout.parts),
                writes=session.writes,
                seconds=self._engine.busy_seconds() - busy_before,
            ),
            timings=PrefillTimings(
                prefill=tail.prefill_seconds, send=max(sent_at - tail.computed_at, 0.0)
            ),
        )

    def _compute_prompt(
        self,
        tokens: list[int],
        blocks: list[int],
        session: PrefillSession,
        abandon: Abandon,
        admission: Admission,
    ) -> Tail:
        """Computes a prompt, in the compute thread. Each layer is sent before the next is computed,
        or on a stream as soon as the stream has computed it."""
        on_gpu = self._on_gpu
        version = self.runner.model.weights_version

        def on_layer(layer: int) -> None:
            abandon.check()
            admission.check(version)
            if isinstance(on_gpu, GpuBlocks):
                on_gpu.push(layer, blocks)
            session.write_layer(
                layer, after=on_gpu.mark() if isinstance(on_gpu, StreamOrder) else None
            )

        abandon.check()
        admission.check(version)
        started = self._clock.monotonic()
        try:
            with span("prefill.compute", prompt_tokens=len(tokens)):
                first_token = self.runner.prefill(tokens, blocks, on_layer)
        except BaseException:
            # The blocks go back to the pool, and peers may be allowed to write into them.
            if isinstance(on_gpu, StreamOrder):
                on_gpu.settle()
            raise
        return Tail(
            model=self.runner.config.name,
            prompt_digest=prompt_digest(tokens),
            first_token=first_token,
            prefill_seconds=self._clock.monotonic() - started,
            computed_at=self._clock.unix(),
            weights_version=version,
        )

    async def _decode(
        self, request: CompletionRequest, run: _Decoding
    ) -> AsyncGenerator[int, None]:
        """Yields the output tokens, prefill's first; fills in `run` before that one."""
        tokens = self.runner.encode(request.prompt)
        all_blocks = self.runner.blocks_for(len(tokens), request.max_tokens)
        prompt_blocks = self._layout.blocks_for(len(tokens))
        params = request.kv_transfer_params
        with contextlib.ExitStack() as blocks:
            table: list[int] = []
            if all_blocks > prompt_blocks:
                # Taken first: a request that has begun never runs out of blocks half-way.
                output_blocks = blocks.enter_context(self._pool.hold(all_blocks - prompt_blocks))
                table = output_blocks.ids.tolist()
            async with self._endpoint.decode_session(
                params.ticket, params.decode_dials, prompt_blocks
            ) as session:
                with self._meter.request():
                    data = await session.wait()
                complete_at, run.first_token_at = self._clock.unix(), self._clock.monotonic()
                self._meter.first_token(run.first_token_at - run.arrived)
                received = blocks.enter_context(session.take())
            if isinstance(self._on_gpu, GpuBlocks):
                pull, ids = self._on_gpu.pull, received.ids.tolist()
                await self._compute.run(lambda: pull(ids))
                run.first_token_at = self._clock.monotonic()
            tail = decode_tail(data, model=self.runner.config.name, tokens=tokens)
            run.request_id, run.created, run.prompt = session.request_id, int(complete_at), tokens
            run.prefill = tail.prefill_seconds
            run.visible_transfer = max(complete_at - tail.computed_at, 0.0)

            run.admission.check(tail.weights_version)
            run.admission.note(tail.weights_version)
            token: int | None = tail.first_token
            first_step = True
            steps = self.runner.decode(
                tail.first_token, len(tokens), received.ids.tolist() + table, request.max_tokens
            )

            def step() -> tuple[int | None, int]:
                version = self.runner.model.weights_version
                run.admission.check(version)
                return next(steps, None), version

            while token is not None:
                self._meter.tokens(1)
                yield token
                if self.runner.ends(token) and not request.ignore_eos:
                    break
                before = self._clock.monotonic()
                with span("decode.first_step") if first_step else contextlib.nullcontext():
                    token, version = await self._compute.run(step)
                first_step = False
                if token is not None:
                    run.admission.note(version)
                    self._meter.next_tokens(self._clock.monotonic() - before)

    def _choice(self, prompt: list[int], output: list[int], request: CompletionRequest) -> Choice:
        return Choice(
            text=text_after(self.runner.tokenizer, prompt, output),
            token_ids=output,
            finish_reason=self._finish_reason(output, request) or "length",
        )

    def _chunk(self, run: _Decoding, *choices: ChunkChoice) -> CompletionChunk:
        return CompletionChunk(
            id=_id(run.request_id),
            created=run.created,
            model=self.runner.config.name,
            weights_version=run.admission.spans[-1].version,
            choices=list(choices),
        )

    def _finish_reason(
        self, output: list[int], request: CompletionRequest
    ) -> Literal["stop", "length"] | None:
        """Returns why nothing comes after `output`; None if something does."""
        if self.runner.ends(output[-1]) and not request.ignore_eos:
            return "stop"
        return "length" if len(output) == request.max_tokens else None


def _id(request_id: str) -> str:
    """Returns the id of an answer in the form of inference engines."""
    return f"cmpl-{request_id}"


def _versions(admission: Admission) -> list[VersionOfTokens]:
    return [VersionOfTokens.model_validate(each._asdict()) for each in admission.spans]


def _usage(tokens: list[int], output: list[int]) -> Usage:
    return Usage(
        prompt_tokens=len(tokens),
        completion_tokens=len(output),
        total_tokens=len(tokens) + len(output),
    )
