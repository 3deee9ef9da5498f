"""The fleet: a control plane, the router, and a pair of vLLM servers that have few KV blocks.

The servers share one core, so that refusing requests takes nothing from them.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Final

from verify.polling import eventually
from verify.processes.cores import on_cores
from verify.processes.fleet import CONTROL_PLANE, Fleet
from verify.processes.vllm.servers import add_vllm

TENANTS: Final = ("calm", "loud")
# The most requests that wait in the control plane, of both tenants together.
MAX_WAITING: Final = 32
_LEASE_SECONDS: Final = 6.0
# Each block has 128 tokens; they are enough for some ten requests at once.
_FEW_BLOCKS: Final = (
    *("--num-gpu-blocks-override", "24", "--max-model-len", "1024"),
    "--no-enable-prefix-caching",
)
_WHOLE_SECONDS: Final = 480.0


class OverloadedFleet(Fleet):
    """The fleet's processes. Each tenant has a key for the router, and both weigh the same."""

    def __init__(self, folder: Path, model: Path, core: set[int]) -> None:
        """Runs the servers on `core`, and everything else on this process's cores."""
        super().__init__(folder)
        self._model, self._core = model, core
        self.keys = {tenant: secrets.token_hex(16) for tenant in TENANTS}

    def start_all(self) -> None:
        pairing = self.folder / "pairing.toml"
        pairing.write_text("[tenants]\n" + "".join(f"{tenant} = 1.0\n" for tenant in TENANTS))
        keys = self.folder / "api-keys"
        keys.touch(mode=0o600)
        keys.write_text("".join(f"{tenant} {key}\n" for tenant, key in self.keys.items()))
        self.start_control_plane(
            *("--lease-seconds", str(_LEASE_SECONDS)),
            *("--max-waiting", str(MAX_WAITING), "--pairing-policy", pairing),
        )
        self.start_router("--api-keys-file", keys)
        with on_cores(self._core):
            for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
                add_vllm(self, name, self._model, *_FEW_BLOCKS, role=role, policy="recompute")

    async def settled(self) -> None:
        """Waits until both servers are ready."""
        await eventually(lambda: asyncio.to_thread(self.whole), _WHOLE_SECONDS, pause=0.1)

    def expired_leases(self) -> int:
        return round(self.running[CONTROL_PLANE].metric("kvxfer_leases_expired_total"))

    def holding(self) -> int:
        """Returns the number of servers that hold KV blocks."""
        return sum(one.metric("vllm:kv_cache_usage_perc") > 0 for one in self.workers.values())
