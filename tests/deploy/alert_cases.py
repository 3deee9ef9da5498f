"""Series for each alert: some on which it must fire, and similar ones on which it must not.

They are series of promtool's unit tests: a value a minute; `a+bxn` is a and then n more, each
greater by b; `_` is no value. Alerts are evaluated after AT minutes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

Series = dict[str, str]

AT: Final = 40


class Case(NamedTuple):
    bad: Series
    good: Series
    labels: str = ""
    """The labels of the alert that fires."""


_ALIVE: Final[Series] = {'kvxfer_build_info{component="control-plane",version="1"}': "1x40"}
_FIRST_TOKEN: Final = "kvxfer_router_time_to_first_token_seconds"
_PAIRING: Final = 'kvxfer_http_request_seconds_bucket{method="POST",route="/v1/transfers",le="%s"}'
_RECEIVED: Final = 'kvxfer_kv_transfers_total{instance="a",direction="receive",outcome="%s"}'


def _ready(role: str, count: int) -> Series:
    return {f'kvxfer_instances{{role="{role}",state="ready"}}': f"{count}x40"}


def _outcomes(delivered: int, lost: int, name: str = "kvxfer_kv_transfers_total") -> Series:
    return {
        f'{name}{{direction="send",outcome="delivered"}}': f"0+{delivered}x40",
        f'{name}{{direction="send",outcome="peer-lost"}}': f"0+{lost}x40",
        f'{name}{{direction="send",outcome="transfer-cancelled"}}': "0+500x40",
    }


CASES: Final = {
    "KvxferControlPlaneDown": Case(
        bad={'kvxfer_build_info{component="router",version="1"}': "1x40"},
        good=_ALIVE,
        labels='component="control-plane"',
    ),
    "KvxferRegistryAway": Case(
        bad={"kvxfer_registry_stale_seconds": "0x30 60+60x10"},
        good={"kvxfer_registry_stale_seconds": "0x38 5 0x5"},
    ),
    "KvxferLeasesExpire": Case(
        bad={'kvxfer_leases_expired_total{instance="a"}': "7x30 7+1x10"},
        # All replicas show the same count, so counts are not added up.
        good={f'kvxfer_leases_expired_total{{instance="{i}"}}': "7x30 8x10" for i in "abcde"},
    ),
    "KvxferControlPlaneSlow": Case(
        bad={_PAIRING % "0.25": "0+1x40", _PAIRING % "0.5": "0+9x40", _PAIRING % "+Inf": "0+9x40"},
        good={_PAIRING % "0.01": "0+9x40", _PAIRING % "+Inf": "0+9x40"},
    ),
    "KvxferScalingFails": Case(
        bad={'kvxfer_scale_failures_total{code="scaling-failed"}': "0+1x40"},
        good={'kvxfer_scale_failures_total{code="scaling-failed"}': "3x40"},
        labels='code="scaling-failed"',
    ),
    "KvxferNoPrefillWorkers": Case(
        bad=_ALIVE | _ready("decode", 3) | _ready("prefill", 0),
        good=_ALIVE | _ready("both", 1),
    ),
    "KvxferNoDecodeWorkers": Case(
        bad=_ALIVE
        | _ready("prefill", 3)
        | {'kvxfer_instances{role="decode",state="joining"}': "1x40"},
        good=_ready("prefill", 3),  # another alert reports the missing control plane
    ),
    "KvxferQueueGrows": Case(
        bad={f'kvxfer_router_waiting{{instance="{i}"}}': "0x30 8x10" for i in "ab"},
        good={"kvxfer_router_waiting": "0x38 50 0x5"},
    ),
    "KvxferKvCacheFull": Case(
        bad={
            'kvxfer_fleet_kv_blocks{role="decode",instance="a"}': "1000x40",
            'kvxfer_fleet_kv_used_blocks{role="decode",instance="a"}': "960x40",
        },
        good={
            'kvxfer_fleet_kv_blocks{role="decode"}': "1000x40",
            'kvxfer_fleet_kv_used_blocks{role="decode"}': "900x40",
        },
        labels='role="decode"',
    ),
    "KvxferRequestsFail": Case(
        bad={
            'kvxfer_router_requests_total{status="200"}': "0+90x40",
            'kvxfer_router_requests_total{status="503"}': "0+10x40",
        },
        good={
            'kvxfer_router_requests_total{status="200"}': "0+90x40",
            'kvxfer_router_requests_total{status="429"}': "0+50x40",
            'kvxfer_router_requests_total{status="503"}': "0+1x40",
        },
    ),
    "KvxferStreamsBreak": Case(
        bad={
            'kvxfer_router_failed_streams_total{code="peer-lost"}': "0+2x40",
            f"{_FIRST_TOKEN}_count": "0+100x40",
        },
        good={
            'kvxfer_router_failed_streams_total{code="peer-lost"}': "0+1x40",
            f"{_FIRST_TOKEN}_count": "0+1000x40",
        },
    ),
    "KvxferFirstTokenSlow": Case(
        bad={
            f'{_FIRST_TOKEN}_bucket{{le="5"}}': "0+50x40",
            f'{_FIRST_TOKEN}_bucket{{le="10"}}': "0+100x40",
            f'{_FIRST_TOKEN}_bucket{{le="+Inf"}}': "0+100x40",
        },
        good={
            f'{_FIRST_TOKEN}_bucket{{le="0.5"}}': "0+95x40",
            f'{_FIRST_TOKEN}_bucket{{le="10"}}': "0+100x40",
            f'{_FIRST_TOKEN}_bucket{{le="+Inf"}}': "0+100x40",
        },
    ),
    "KvxferTransfersFail": Case(
        bad=_outcomes(delivered=100, lost=40, name="vllm:kvxfer_transfers_total"),
        good=_outcomes(delivered=100, lost=1),
        labels='direction="send"',
    ),
    "KvxferChecksumMismatch": Case(
        bad={_RECEIVED % "checksum-mismatch": "0x39 1"},
        good={_RECEIVED % "checksum-mismatch": "0x40", _RECEIVED % "peer-lost": "0+1x40"},
        labels='instance="a"',
    ),
    "KvxferPeersFreeze": Case(
        bad={'kvxfer_peers_lost_total{instance="a",code="peer-timeout"}': "0x30 0+1x10"},
        good={
            'kvxfer_peers_lost_total{instance="a",code="peer-timeout"}': "0x30 1x10",
            'kvxfer_peers_lost_total{instance="a",code="peer-lost"}': "0+9x40",
        },
        labels='instance="a"',
    ),
    "KvxferNicLost": Case(
        bad={'kvxfer_peers_lost_total{instance="a",code="nic-lost"}': "0x38 1x10"},
        good={'kvxfer_peers_lost_total{instance="a",code="nic-lost"}': "2x40"},
        labels='instance="a"',
    ),
    "KvxferStrangers": Case(
        bad={
            'kvxfer_refused_total{what="handshake",code="authentication-failed"}': "0x30 0+2x10",
        },
        good={
            'kvxfer_refused_total{what="handshake",code="authentication-failed"}': "0x30 2x10",
            'kvxfer_refused_total{what="write",code="stale-counter"}': "0+9x40",
        },
        labels='code="authentication-failed", what="handshake"',
    ),
    "KvxferCallersRefused": Case(
        bad={'kvxfer_http_errors_total{code="unauthenticated"}': "0x30 0+9x10"},
        good={'kvxfer_http_errors_total{code="no-capacity"}': "0+99x40"},
        labels='code="unauthenticated"',
    ),
}
