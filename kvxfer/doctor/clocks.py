"""The clock of this host, compared with the control plane's: tickets depend on it."""

from __future__ import annotations

import ssl
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final

from kvxfer.clock import CLOCK_LEEWAY, SYSTEM_CLOCK, Clock
from kvxfer.doctor.finding import Area, Finding, Status
from kvxfer.doctor.host import Host

if TYPE_CHECKING:
    import httpx2

_TIMEOUT_SECONDS: Final = 2.0
_DATE_SECONDS: Final = 1.0  # the resolution of the header `Date`


def clock(
    host: Host, *, transport: httpx2.BaseTransport | None = None, clock: Clock = SYSTEM_CLOCK
) -> list[Finding]:
    """Asks the control plane that KVXFER_CONTROL_PLANE names; without one there is no finding."""
    url = host.environment.get("KVXFER_CONTROL_PLANE")
    if not url:
        return []
    # Imported only if needed: that takes a while.
    import httpx2

    try:
        tls = ssl.create_default_context(cafile=host.environment.get("KVXFER_CA_FILE") or None)
        with httpx2.Client(
            timeout=_TIMEOUT_SECONDS, trust_env=False, verify=tls, transport=transport
        ) as http:
            asked_at = clock.unix()
            answer = http.get(f"{url.rstrip('/')}/healthz")
        there = parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (httpx2.HTTPError, httpx2.InvalidURL, KeyError, ValueError, OSError) as error:
        return [
            Finding(
                *(Area.SETTINGS, "clock", Status.INFO),
                f"not compared: the control plane does not say its time ({type(error).__name__})",
                "start `kvxfer serve`, or correct KVXFER_CONTROL_PLANE (and KVXFER_CA_FILE)",
            )
        ]
    ahead, behind = asked_at - there - _DATE_SECONDS, there - clock.unix()
    seconds, how = (ahead, "ahead of") if ahead > behind else (behind, "behind")
    if seconds > CLOCK_LEEWAY:
        return [
            Finding(
                *(Area.SETTINGS, "clock", Status.LIMITED),
                f"{seconds:.0f} s {how} the control plane's: tickets may be refused here",
                "synchronise the clocks of both hosts (NTP)",
            )
        ]
    return [Finding(Area.SETTINGS, "clock", Status.OK, "as the control plane's")]
