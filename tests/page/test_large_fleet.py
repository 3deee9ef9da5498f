"""10,000 instances behind the page: the page stays small and leads to each of them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator

import pytest

from kvxfer.instances import InstanceState, Load, Traffic
from kvxfer.scheduler.embedded import EmbeddedRegistry
from kvxfer.scheduler.lease_policy import LeasePolicy
from verify.processes.control_plane import RunningControlPlane, worker

from .looks import barriers, expect, live, shown_again

pytestmark = pytest.mark.native

INSTANCES = 10_000
ZONES, RACKS, HOSTS = 4, 250, 2_500


async def filled() -> EmbeddedRegistry:
    """Returns 10,000 instances: each decode worker on a host with a prefill that sends to it."""
    registry = EmbeddedRegistry(LeasePolicy(lease_seconds=3600))
    for number in range(INSTANCES):
        role = "prefill" if number % 2 else "decode"
        host = number // 4
        labels = {
            "zone": f"zone-{host % ZONES}",
            "rack": f"rack-{host % RACKS:03}",
            "host": f"host-{host:04}",
        }
        name = f"{role}-{number:05}"
        lease = await registry.register(
            worker(name, role, labels=labels), state=InstanceState.READY
        )
        to = Traffic(to=f"decode-{number - 1:05}", fabric="verbs", bytes_per_second=1e9 + number)
        load = Load(running=number % 9, free_blocks=number % 65, sent=(to,) * (number % 2))
        await registry.heartbeat(name, lease.epoch, load=load)
    return registry


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # Playwright has an event loop in this thread, so `asyncio.run` needs another thread.
    made: list[EmbeddedRegistry] = []
    thread = threading.Thread(target=lambda: made.append(asyncio.run(filled())))
    thread.start()
    thread.join()
    with RunningControlPlane(registry=made[0]) as server:
        yield server.url


def test_ten_thousand_instances_are_shown_and_each_can_be_reached(page, url, packages):
    page.add_init_script(
        "window.held = []; new PerformanceObserver((list) => held.push(...list.getEntries()"
        ".map((each) => each.duration))).observe({ type: 'longtask', buffered: true })"
    )
    page.goto(url)
    live(page)
    seconds = page.evaluate("performance.now()") / 1000
    expect(page.locator("#summary div").first).to_have_text(re.compile("10,000"))
    expect(page.locator("#map-note")).to_have_text("4 zones; open one to see inside")
    expect(page.locator("#pairs tr")).to_have_count(50)
    expect(page.locator("#pairs-note")).to_have_text("the 50 with the most of 5,000")
    expect(page.locator("#instances tr")).to_have_count(50)
    assert page.evaluate("document.querySelectorAll('*').length") < 2500
    shown_again(page, 5)
    held = page.evaluate("held")
    print(
        f"10,000 instances: seen after {seconds:.1f} s; {len(held)} long tasks, the "
        f"longest {max(held, default=0):.0f} ms"
    )

    for place, note in (
        ("zone-0", r"125 racks"),
        ("rack-000", r"(20|40) instances"),
    ):
        page.locator("#map .tile", has_text=place).click()
        expect(page.locator("#map-note")).to_have_text(re.compile(note))
        assert page.evaluate("document.querySelectorAll('*').length") < 4000
    assert barriers(page, packages) == []
    page.locator("#map .tile").first.click()
    expect(page.get_by_role("dialog").locator("#instance-facts")).to_contain_text("zone-0")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="everything").click()
    expect(page.locator("#page-note")).to_have_text("1 to 50 of 10000")
    page.get_by_role("button", name="Next").click()
    expect(page.locator("#page-note")).to_have_text("51 to 100 of 10000")
    page.get_by_label("Name").fill("09999")
    expect(page.locator("#instances tr")).to_have_count(1)
    expect(page.locator("#instances")).to_contain_text("prefill-09999")
