"""The control plane as workers, routers and the CLI call it: typed, async and sync.

`url` is the address of `kvxfer serve`; the default is KVXFER_CONTROL_PLANE, or else
http://127.0.0.1:8080. `credentials` come from the environment unless given. `timeout` bounds each
step of an attempt, `deadline` all attempts of a call together, both in seconds; a deadline of 0
allows one attempt. Proxy settings of the environment are not used: the control plane is part of the
cluster.

A call is sent again if it was not carried out (no connection, 429, 503 for lack of a registry), or
if doing it twice does no harm; never before the time in Retry-After. NoCapacity is an answer, not a
failure: it is raised at once.

While its registry is unavailable, the control plane answers with what it last knew.
`client.ask(call)`, with a call of `kvxfer.client.calls`, returns the result of the method of that
name, and its age.

`Registration` keeps a worker registered while its block runs. `WeightUpdateReport` reports an
update of a model's weights; `ControlPlaneRegistrar` reports the updates of a Trainer.

Every method raises the error of `kvxfer.errors` that the control plane names,
ControlPlaneUnavailable if there is no answer, and UntrustedCertificate if TLS fails.
"""

from kvxfer.cached_blocks import CachedBlocks
from kvxfer.client.answers import Answer
from kvxfer.client.calls import Call
from kvxfer.client.clients import ControlPlaneClient, SyncControlPlaneClient
from kvxfer.client.registration import Registration
from kvxfer.client.update_registrar import ControlPlaneRegistrar
from kvxfer.client.weight_update_report import WeightUpdateReport
from kvxfer.control_plane import DEFAULT_URL, ENVIRONMENT, Credentials
from kvxfer.instances import (
    BlockUpdate,
    Change,
    Instance,
    InstanceSpec,
    InstanceState,
    Lease,
    Load,
    PublishedBlocks,
    Registered,
    Role,
    Snapshot,
    Traffic,
)
from kvxfer.kv.block_table import BlockTable
from kvxfer.overview import Overview, OverviewQuery
from kvxfer.scaling import ScalePlan
from kvxfer.traces import Trace
from kvxfer.transfers import Handshake, OpenedTransfer, Party, Transfer, TransferRequest
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decided,
    Decision,
    PartReport,
    PartState,
    ReportUpdate,
    UpdateError,
    UpdatePolicy,
    WeightUpdate,
)

__all__ = [
    "DEFAULT_URL",
    "ENVIRONMENT",
    "AnnounceUpdate",
    "Answer",
    "BlockTable",
    "BlockUpdate",
    "CachedBlocks",
    "Call",
    "Change",
    "ControlPlaneClient",
    "ControlPlaneRegistrar",
    "Credentials",
    "Decided",
    "Decision",
    "Handshake",
    "Instance",
    "InstanceSpec",
    "InstanceState",
    "Lease",
    "Load",
    "OpenedTransfer",
    "Overview",
    "OverviewQuery",
    "PartReport",
    "PartState",
    "Party",
    "PublishedBlocks",
    "Registered",
    "Registration",
    "ReportUpdate",
    "Role",
    "ScalePlan",
    "Snapshot",
    "SyncControlPlaneClient",
    "Trace",
    "Traffic",
    "Transfer",
    "TransferRequest",
    "UpdateError",
    "UpdatePolicy",
    "WeightUpdate",
    "WeightUpdateReport",
]
