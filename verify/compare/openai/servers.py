"""One model served twice: by an aggregated vLLM, and by a pair behind `kvxfer router`."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from verify.compare.openai.cases import Case
from verify.polling import wait_until
from verify.processes.fleet import Fleet
from verify.processes.programs import Server
from verify.processes.vllm import servers
from verify.processes.vllm.servers import add_vllm, make_model, vllm

ARGUMENTS: Final = (
    *("--enable-scale-out", "--enable-prompt-tokens-details"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    # An answer without a limit ends here.
    *("--max-model-len", "1536"),
    # Room for all prompts of a run: cached tokens show in an answer's usage.
    *("--kv-cache-memory-bytes", str(1 << 30)),
    # On a CPU, vLLM 0.32 crashes on a prompt with a seed that it computes in chunks.
    *("--max-num-batched-tokens", "32768"),
)
"""The arguments of each server, which routes and members need."""
_LEASE_SECONDS: Final = 20.0
# The cores of a test machine are busy; answers are compared, not speed.
_PEER_TIMEOUT: Final = 5.0


@dataclass(frozen=True, slots=True)
class Setup:
    """A model, and the arguments of its servers."""

    name: str
    kind: str = ""
    """A kind of tiny_models.py; if empty, the tiny Llama."""
    arguments: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    """The names of LoRA adapters that requests use."""
    spared: Callable[[Case], bool] = lambda _: False
    """Returns whether a case would crash an engine with these arguments; such a case is not
    sent."""
    whole: bool = False
    """Whether all generated requests are sent, not only one in `_STEP`."""


def _asks_logprobs_of_the_prompt(case: Case) -> bool:
    """Returns whether a case asks for logprobs of the prompt: with a LoRA, vLLM 0.32 on a CPU
    crashes on them."""
    return any(
        isinstance(body, dict)
        and (body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs")))
        for body in case.bodies
    )


SETUPS: Final = (
    Setup("llama", whole=True),
    Setup("reasoning", arguments=("--reasoning-parser", "qwen3")),
    Setup("adapters", adapters=("blue", "red"), spared=_asks_logprobs_of_the_prompt),
    # On a CPU, vLLM's Mamba 2 crashes if the prefix cache keeps states.
    Setup("hybrid", kind="mamba", arguments=("--no-enable-prefix-caching",)),
    Setup("experts", kind="experts"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """The servers of one model."""

    model: Path
    fleet: Fleet
    aggregated: Server
    second: Server | None
    """A second aggregated server, which shows differences that the comparison itself causes."""

    @property
    def prefill(self) -> Server:
        return self.fleet.running["prefill"]

    @property
    def decode(self) -> Server:
        return self.fleet.running["decode"]

    def received_tokens(self) -> float:
        """Returns the number of prompt tokens that decode has got from prefill."""
        return self.decode.metric("vllm:external_prefix_cache_hits_total")


@contextlib.contextmanager
def serving(folder: Path, setup: Setup, *, second: bool) -> Iterator[Compared]:
    """Starts all servers of a model, and waits until they are ready."""
    model = _model_of(folder, setup)
    arguments = (*ARGUMENTS, *setup.arguments)
    if setup.adapters:
        named = [f"{name}={_adapter(folder, name)}" for name in setup.adapters]
        arguments += ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", *named)
    with contextlib.ExitStack() as stack:
        fleet = stack.enter_context(Fleet(folder / setup.name))
        fleet.start_control_plane()
        fleet.start_router()
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            add_vllm(
                fleet,
                name,
                model,
                *arguments,
                role=role,
                checksums=True,
                peer_timeout=_PEER_TIMEOUT,
                lease_seconds=_LEASE_SECONDS,
            )
        alone = [
            stack.enter_context(vllm(name, fleet.folder, model, *arguments))
            for name in ("aggregated", "second")[: 1 + second]
        ]
        for server in (*fleet.workers.values(), *alone):
            server.serves("/health")
        wait_until(fleet.whole)
        yield Compared(model, fleet, alone[0], alone[1] if second else None)


def _model_of(folder: Path, setup: Setup) -> Path:
    if not setup.kind:
        made = folder / "tiny"
        return made if made.exists() else make_model(folder, "--tokenizer", "bytes")
    made = folder / setup.kind
    if not made.exists():
        _make("tiny_models.py", setup.kind, made, "--tokenizer", "bytes")
    return made


def _adapter(folder: Path, name: str) -> Path:
    made = folder / name
    if not made.exists():
        _make("tiny_lora.py", made, str(sum(name.encode())))
    return made


def _make(maker: str, *arguments: str | Path) -> None:
    program = Path(servers.__file__).with_name(maker)
    subprocess.run([servers.VLLM_PYTHON, str(program), *map(str, arguments)], check=True)
