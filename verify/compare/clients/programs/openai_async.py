"""The openai package with asyncio, many requests at once."""

from __future__ import annotations

import asyncio
from typing import Any

import session
from openai import AsyncOpenAI

AT_ONCE = 24


async def ask(url: str, _model: str) -> None:
    async with AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:

        async def one(number: int) -> str:
            asked: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}
            asked["messages"] = [{"role": "user", "content": session.text(number)}]
            if number % 2:
                answer = await client.chat.completions.create(**asked)
                return str(answer.choices[0].message.content)
            async with client.chat.completions.stream(**asked) as stream:
                parts = [event.delta async for event in stream if event.type == "content.delta"]
            return "".join(parts)

        async def leaves() -> int:
            """Leaves a stream after its third chunk. Returns the number of chunks."""
            chunks = await client.completions.create(
                model="tiny", prompt=session.text(99), max_tokens=900, stream=True
            )
            count = 0
            async with chunks:
                async for _ in chunks:
                    count += 1
                    if count == 3:
                        break
            return count

        texts = await asyncio.gather(*map(one, range(AT_ONCE)))
        found = {"chats": list(texts), "left after": await leaves()}
        found["and then"] = await one(100)
    session.tell("openai", f"{AT_ONCE} chats at once, streamed and not; one that is left", found)


session.run(lambda url, model: asyncio.run(ask(url, model)))
