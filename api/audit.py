"""A log line for each decision about the fleet: who, what, from where."""

from __future__ import annotations

import logging

from fastapi import Request

from kvxfer.api.access import caller
from kvxfer.logs import AUDIT
from kvxfer.scaling import ScalePlan

_log = logging.getLogger(AUDIT)


def note(request: Request, action: str, **about: object) -> None:
    """Logs a decision of the caller of a request."""
    address = None if request.client is None else request.client.host
    _log.info(action, extra={"caller": caller(request).name, "address": address, **about})


def note_scaling(plan: ScalePlan) -> None:
    """Logs the changes that the autoscaler of this replica applies."""
    if not plan.leads:
        return
    for decision in (plan.prefill, plan.decode):
        if decision.direction != "hold":
            about = {
                "caller": "autoscaler",
                "policy": plan.policy,
                "backend": plan.backend,
                "role": decision.role.value,
                "workers": decision.wanted,
                "before": decision.current,
                "because": decision.because,
            }
            _log.info("scale", extra=about)
