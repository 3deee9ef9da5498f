"""One leader among several replicas, by a lock in Redis with a fencing token.

The lock is one key with a time to live; every step on it is a Lua script and thus atomic, and every
call ends within a few seconds. Tokens ascend even if Redis loses its data: a token is at least the
microseconds since the Unix epoch, by Redis' clock. A fail-over to a replica of Redis that missed
the latest term may let two control planes lead until the older one renews; the fencing of the
backend (`kubernetes.py`) bounds what that can do.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Final

from kvxfer.errors import ControlPlaneUnavailable, NotLeader
from kvxfer.scheduler.scaling.leader import Leader

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript

_ANSWER_SECONDS: Final = 5.0

# KEYS: lock, last token. ARGV: replica, milliseconds.
_CAMPAIGN: Final = """
local held = redis.call('GET', KEYS[1])
if held then
  local replica, token = string.match(held, '^(.*) (%d+)$')
  if replica ~= ARGV[1] then return false end
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return token
end
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local token = string.format('%.0f', math.max(last + 1, now))
redis.call('SET', KEYS[2], token)
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. token, 'PX', ARGV[2])
return token
"""
# KEYS: lock. ARGV: replica and token.
_RESIGN: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisLeader(Leader):
    """A holder of the lock for `seconds` after each `campaign`; call it a few times in that time.

    Owns the client.
    """

    def __init__(self, redis: Redis, *, seconds: float = 30.0, prefix: str = "kvxfer") -> None:
        self._redis = redis
        self._milliseconds = max(round(seconds * 1000), 1)
        # Both have one hash tag: that of the prefix if it has one.
        self._lock, self._last = (f"{prefix}:{{scaling}}:{key}" for key in ("leader", "token"))
        self._replica = secrets.token_hex(8)
        self._token: int | None = None
        self._campaign: AsyncScript = redis.register_script(_CAMPAIGN)
        self._resign: AsyncScript = redis.register_script(_RESIGN)

    async def campaign(self) -> int | None:
        self._token = None
        answer = await self._run(
            self._campaign, [self._lock, self._last], [self._replica, self._milliseconds]
        )
        self._token = None if answer is None else _token(answer, self._last)
        return self._token

    async def confirm(self, token: int) -> None:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                held = await self._redis.get(self._lock)
        except (RedisError, OSError) as error:
            raise NotLeader(
                f"it is unknown if token {token} still leads: Redis does not answer "
                f"({_words(error)}); nothing was written"
            ) from error
        text = held.decode(errors="backslashreplace") if isinstance(held, bytes) else held
        if text != self._holding(token):
            raise NotLeader(
                f"token {token} no longer leads the autoscaling ({text or 'no replica'} does); "
                "nothing was written"
            )

    async def resign(self) -> None:
        token, self._token = self._token, None
        if token is not None:
            await self._run(self._resign, [self._lock], [self._holding(token)])

    async def close(self) -> None:
        await self._redis.aclose()

    def _holding(self, token: int) -> str:
        return f"{self._replica} {token}"

    async def _run(
        self, script: AsyncScript, keys: list[str], arguments: list[str | int]
    ) -> bytes | str | int | None:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer: bytes | str | int | None = await script(keys=keys, args=arguments)
        except (RedisError, OSError) as error:
            raise ControlPlaneUnavailable(
                f"Redis does not answer ({_words(error)}); the autoscaler has no leader until it "
                "does"
            ) from error
        return answer


def _token(answer: bytes | str | int, key: str) -> int:
    try:
        return int(answer)
    except ValueError:
        raise ControlPlaneUnavailable(
            f"the token {answer!r} in Redis is not a number, so the autoscaler has no leader; "
            f"delete the key {key} there"
        ) from None


def _words(error: Exception) -> str:
    return str(error) or f"nothing within {_ANSWER_SECONDS:g} s"
