"""The settings of a worker."""

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
    """The settings of a worker. Raises InvalidArgument for values out of bounds."""

    role: Literal["prefill", "decode"]
    """Side of transfers that the worker takes."""
    cluster_key: bytes = field(repr=False)
    options: OperatorOptions
    """Options of the transfer engine, except `host`."""
    control_plane: str | None = None
    """URL of the control plane; None takes the default of `ControlPlaneClient`."""
    credentials: Credentials | None = None
    """Credentials for the control plane; None takes those of the environment."""
    ticket_keys: WatchedFile[TicketKeys] | None = field(default=None, repr=False)
    """Keys that verify tickets; None derives the key from the cluster key."""
    instance_id: str | None = None  # made up
    """Name of the worker in the cluster."""
    host: str = "127.0.0.1"
    """Address to listen on, and to be reached at."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """HTTP port; 0 takes any free one."""
    blocks: Annotated[int, Meta(ge=1)] = 1024
    """KV blocks, of 16 tokens each."""
    model: Path | None = None  # the demo model
    """Hugging Face checkpoint folder of a Llama model."""
    gpu: Annotated[int, Meta(ge=0)] | None = None  # host memory
    """Send from, and receive into, memory of this GPU, by CUDA's number in this process. The model
    computes there, or, if torch has no CUDA, on the processor with a copy."""
    threads: Annotated[int, Meta(ge=1)] | None = None  # torch's choice
    """Threads of torch."""
    checksums: bool = False
    """Check every transfer by a checksum of its blocks, whatever the other side's setting."""
    weights: bool = False
    """Take weight updates from the coordinator of a training job."""
    weights_coordinator: str | None = None  # the coordinator dials
    """Address of the coordinator's engine, which this worker dials; it takes updates then."""
    weights_policy: Literal["drain", "abort", "keep"] = "drain"
    """Effect of an update on running requests: they end first, or are aborted, or continue with the
    new weights."""
    weights_drain: Seconds = 30.0
    """Seconds after the arrival of an update until requests that have not ended are aborted."""
    weights_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights that training sends."""
    weights_arena: Annotated[int, Meta(ge=256)] | None = None  # a whole copy of the weights
    """Stage at most this many bytes of an update, and take updates in waves, between which the
    worker serves no request."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the worker; `host` is this host's name if it is left out."""

    def __post_init__(self) -> None:
        check_bounds(self)
