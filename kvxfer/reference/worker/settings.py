"""What an operator can set about a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from kvxfer.settings import Seconds, check_bounds

if TYPE_CHECKING:
    from kvxfer.client import Credentials
    from kvxfer.engine.operator_options import OperatorOptions
    from kvxfer.ticket import TicketKeys
    from kvxfer.watched_file import WatchedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Raises InvalidArgument for what cannot be meant."""

    role: Literal["prefill", "decode"]
    """Which side of transfers it takes."""
    cluster_key: bytes = field(repr=False)
    options: OperatorOptions
    """Of the transfer engine, but for `host`."""
    control_plane: str | None = None
    """URL; None takes what `ControlPlaneClient` takes."""
    credentials: Credentials | None = None
    """What the control plane asks for; None takes those of the environment."""
    ticket_keys: WatchedFile[TicketKeys] | None = field(default=None, repr=False)
    """Verify the tickets; None takes the key that follows from the cluster key."""
    instance_id: str | None = None  # made up
    """Its name in the cluster."""
    host: str = "127.0.0.1"
    """Address to listen on, and to be reached at."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Of HTTP; 0 takes any free one."""
    blocks: Annotated[int, Meta(ge=1)] = 1024
    """KV blocks, of 16 tokens each."""
    model: Path | None = None  # the demo model
    """Hugging Face checkpoint folder of a Llama model."""
    gpu: Annotated[int, Meta(ge=0)] | None = None  # host memory
    """Send from, and receive into, memory of this GPU, by CUDA's number in this process. The model
    computes there, or where torch is built without CUDA on the processor, with a copy."""
    threads: Annotated[int, Meta(ge=1)] | None = None  # torch's choice
    """Threads of torch."""
    checksums: bool = False
    """Check every transfer by a checksum of its blocks, whatever the other side's setting."""
    weights: bool = False
    """Take updates of the weights, as the coordinator of a training job sends them."""
    weights_coordinator: str | None = None  # it dials
    """Address of the coordinator's engine, which this worker dials; it takes updates then."""
    weights_policy: Literal["drain", "abort", "keep"] = "drain"
    """What an update does with running requests: they end first, or are aborted, or go on with the
    new weights."""
    weights_drain: Seconds = 30.0
    """Requests that have not ended so long after an update came are aborted."""
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of what training sends."""
    weights_arena: Annotated[int, Meta(ge=256)] | None = None  # a whole copy of the weights
    """Stage at most so many bytes of an update, and take updates in waves, between which the worker
    serves no request."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Where it runs; `host` is this host's name where it is left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
