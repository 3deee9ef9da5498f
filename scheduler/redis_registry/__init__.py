"""The registry in Redis, shared by all replicas of the control plane.

Redis holds the true state and takes each step as one script (lua/). Every replica follows the log
of those steps and holds the same fleet in memory (mirror.py), from which it reads and pairs.
"""

from kvxfer.scheduler.redis_registry.registry import RedisRegistry

__all__ = ["RedisRegistry"]
