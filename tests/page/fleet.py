"""A real fleet behind the page: control plane with tokens and autoscaler, router, reference
workers in two zones, and requests that keep coming."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import httpx2

from kvxfer.web.tokens import Scope
from verify.polling import wait_until
from verify.processes.fleet import Fleet
from verify.processes.programs import Server

WORKER, ROUTER, TRAINER, ADMIN, MONITOR = (f"{scope}-token-of-the-tests" for scope in Scope)
TOKENS = f"""\
job trainer {TRAINER}
ops admin {ADMIN}
wall monitor {MONITOR}
node worker {WORKER}
router router {ROUTER}
"""
POLICY = """\
interval: 2
prefill: {max: 4, requests: 4}
decode: {max: 4, requests: 1}
"""
# instance: zone, rack, host, fabrics
WORKERS = {
    "prefill-0": ("eu-1a", "r1", "node-1", "local,tcp"),
    "prefill-1": ("eu-1b", "r7", "node-9", "tcp"),
    "decode-0": ("eu-1a", "r1", "node-2", "local,tcp"),
    "decode-1": ("eu-1a", "r2", "node-4", "local,tcp"),
}
BLOCKS = 256
PROMPT = "The KV cache of this prompt travels from one worker to another. " * 20


class Zones(Fleet):
    """Workers in two zones, behind a control plane with tokens and scopes."""

    def __init__(self, folder: Path) -> None:
        (folder / "tokens").write_text(TOKENS)
        (folder / "scaling.yaml").write_text(POLICY)
        super().__init__(folder, token=ADMIN)

    def start_all(self) -> None:
        self.start_control_plane()
        self.start_router(KVXFER_TOKEN=ROUTER)
        for name in WORKERS:
            self._begin(name).ready()

    def start_control_plane(self, *options: str | Path) -> Server:
        """Starts the control plane, or starts it again at the same address."""
        return super().start_control_plane(
            *("--tokens-file", self.folder / "tokens", "--lease-seconds", "9"),
            *("--scaling-policy", self.folder / "scaling.yaml", *options),
        )

    def _begin(self, name: str) -> Server:
        zone, rack, host, fabrics = WORKERS[name]
        labels = [f"zone={zone}", f"rack={rack}", f"host={host}"]
        return self.begin_worker(
            *(name, "--blocks", str(BLOCKS), "--threads", "1", "--fabrics", fabrics),
            *(word for label in labels for word in ("--label", label)),
            KVXFER_TOKEN=WORKER,
        )


class Requests:
    """Keeps some completions under way until the block ends."""

    def __init__(self, router: str, at_once: int = 4) -> None:
        self._router = router
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._send, daemon=True) for _ in range(at_once)]
        self.answered = 0

    def __enter__(self) -> Requests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": 48, "ignore_eos": True, "stream": False}
        with httpx2.Client(base_url=self._router, timeout=60) as client:
            models = client.get("/v1/models").json()["data"]
            body["model"] = models[0]["id"] if models else ""

            def answered() -> bool:
                # A busy machine answers late, and drained or killed workers not at all.
                with contextlib.suppress(httpx2.HTTPError):
                    if client.post("/v1/completions", json=body).is_success:
                        self.answered += 1
                        return True
                return self._stop.is_set()

            while not self._stop.is_set():
                wait_until(answered, 600, pause=0.2)
