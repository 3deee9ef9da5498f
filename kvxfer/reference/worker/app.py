"""The HTTP API of a worker."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from kvxfer.errors import KvxferError
from kvxfer.reference.worker import problems
from kvxfer.reference.worker.chat import ChatChunks, ChatRequest, Chunk, chat_completion
from kvxfer.reference.worker.completions import (
    CompletionChunk,
    CompletionRequest,
    DecodeCompletion,
    Health,
    PrefillCompletion,
)
from kvxfer.reference.worker.service import WorkerService
from kvxfer.reference.worker.tokenization import Tokenized, TokenizeRequest
from kvxfer.tracing.asgi import TraceRequests
from kvxfer.web.answer import DONE, EventStream, data_event, while_connected

if TYPE_CHECKING:
    from kvxfer.tracing.tracer import Tracer


def make_app(service: WorkerService, tracer: Tracer | None = None) -> FastAPI:
    """Makes the app of one worker: `POST /v1/completions`, `/v1/chat/completions` and `/tokenize`,
    `GET /healthz` and `/metrics`. With a tracer, requests that bring a trace have spans."""
    app = FastAPI(title="kvxfer worker")
    problems.install(app)

    @app.post("/v1/completions", response_model=PrefillCompletion | DecodeCompletion)
    async def complete(body: CompletionRequest, request: Request) -> Any:
        if body.stream:
            return EventStream(_events(service.stream(body)))
        return await while_connected(request.receive, service.complete(body))

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Any:
        asked = body.completion()
        if asked.stream:
            return EventStream(_events(service.stream(asked), ChatChunks().turn))
        answer = await while_connected(request.receive, service.complete(asked))
        return chat_completion(answer.model_dump())

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        return service.tokenize(body)

    @app.get("/healthz")
    async def health() -> Health:
        return service.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics(), media_type=CONTENT_TYPE_LATEST)

    if tracer is not None:
        app.add_middleware(TraceRequests, tracer=tracer)
    return app


async def _events(
    chunks: AsyncGenerator[CompletionChunk, None],
    turn: Callable[[Chunk], Chunk] = lambda chunk: chunk,
) -> AsyncGenerator[bytes, None]:
    """Yields `chunks` as OpenAI streams them; an error after the first is a separate event."""
    begun = False
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                begun = True
                yield data_event(turn(_event(chunk)))
        except KvxferError as error:
            if not begun:
                raise
            yield data_event({"error": {"message": str(error), "code": error.code}})
            return
    yield DONE


def _event(chunk: CompletionChunk) -> Chunk:
    """Returns a chunk without the members that only the last chunk, or only the first one, has."""
    told = {name: value for name, value in chunk.model_dump().items() if value is not None}
    for choice in told["choices"]:
        if choice["prompt_token_ids"] is None:
            del choice["prompt_token_ids"]
    return told
