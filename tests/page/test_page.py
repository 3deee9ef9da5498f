"""The page in a browser, over a real fleet: what it shows, what it does, and what it says when it
cannot. Tests run in order; the last ones take the fleet apart."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from kvxfer.client import Credentials, SyncControlPlaneClient
from kvxfer.instances import InstanceState
from kvxfer.weight_updates import (
    AnnounceUpdate,
    Decision,
    PartReport,
    PartState,
    ReportUpdate,
)
from verify.processes.fleet import CONTROL_PLANE

from .fleet import ADMIN, MONITOR, TRAINER, WORKER, WORKERS, Requests
from .looks import barriers, expect, live, shown_again, sign_in, take_picture

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.native

NAMES = sorted(WORKERS)


def tile(page: Page, name: str):
    return page.locator("#map .tile", has_text=name)


def open_dialog(page: Page, name: str):
    """Opens the dialog of an instance and returns it when it shows the facts."""
    page.locator("#instances").get_by_role("button", name=name).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator("#instance-facts")).to_contain_text("last heartbeat")
    return dialog


def test_a_wrong_token_is_reported_and_a_valid_one_stays_in_its_tab(page, context, fleet, packages):
    sign_in(page, fleet.url, "not-a-token-of-anybody")
    problem = page.get_by_role("alert")
    expect(problem).to_have_text(re.compile("does not know this token"))
    assert barriers(page, packages) == []
    sign_in(page, fleet.url, WORKER)
    expect(problem).to_have_text(re.compile("for worker; the page takes one with scope monitor"))
    sign_in(page, fleet.url, ADMIN)
    live(page)
    assert page.evaluate("Object.values(sessionStorage)") == [ADMIN]
    assert page.evaluate("Object.values(localStorage)") == []
    assert context.cookies() == []
    assert ADMIN not in page.url
    page.reload()
    live(page)
    other = context.new_page()
    other.goto(fleet.url)
    expect(other.get_by_label("Token")).to_be_focused()
    other.close()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("Token")).to_be_focused()
    expect(page.locator("#view")).to_be_hidden()
    assert page.evaluate("Object.values(sessionStorage)") == []


def test_the_fleet_is_shown_in_light_in_dark_and_on_a_phone(page, fleet, packages):
    sign_in(page, fleet.url, ADMIN)
    live(page)
    for name in NAMES:
        expect(tile(page, name)).to_have_class(re.compile(f"{name.partition('-')[0]} ready"))
    places = page.locator("#map .place")
    assert places.all_inner_texts() == [
        *("eu-1a", "r1", "node-1", "node-2", "r2", "node-4"),
        *("eu-1b", "r7", "node-9"),
    ]
    with Requests(fleet.router.url) as requests:
        pairs = page.locator("#pairs")
        # prefill-1 has tcp only; prefill-0 is on the host of both decode workers.
        for prefill, fabric in (("prefill-0", "local"), ("prefill-1", "tcp")):
            row = pairs.locator("tr", has_text=prefill).first
            expect(row).to_have_text(re.compile(rf"→ decode-\d{fabric}[1-9.]+ .B/s"))
        expect(page.locator("#transfers tr").first).to_contain_text("→ decode-")
        expect(page.locator("#charts .legend").first).to_contain_text("tcp")
        kv = page.locator("#summary div", has_text="decode")
        expect(kv).to_have_text(re.compile(r"KV in use [1-9]\d? %"))
        change = page.locator("#scaling li.up").first
        expect(change).to_contain_text("requests running and")
        shown_again(page, 8)  # lines need some points
        take_picture(page, "page-light", 1160)
        assert barriers(page, packages) == []
        page.emulate_media(color_scheme="dark")
        take_picture(page, "page-dark", 1160)
        assert barriers(page, packages) == []
        page.set_viewport_size({"width": 360, "height": 740})
        expect(page.locator("#connection")).to_be_visible()
        take_picture(page, "page-phone", 1400)
        assert barriers(page, packages) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert requests.answered > 0


def test_everything_works_by_keyboard(page, fleet, packages):
    sign_in(page, fleet.url, ADMIN)
    live(page)
    page.reload()
    live(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the fleet")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.get_by_role("button", name="everything").focus()
    page.keyboard.press("Tab")
    tiles = page.locator("#map .tile")
    expect(tiles.first).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(tiles.nth(1)).to_be_focused()
    page.keyboard.press("End")
    expect(tiles.last).to_be_focused()
    name = tiles.last.locator(".name").inner_text()
    expect(tiles.last).to_have_accessible_name(re.compile(f"^{name} .* prefill, ready, KV"))
    shown_again(page, 2)  # the focus stays where it was
    expect(tiles.last).to_be_focused()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_role("heading")).to_have_text(name)
    expect(dialog.locator("#instance-facts")).to_contain_text("last heartbeat")
    assert barriers(page, packages) == []
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(tiles.last).to_be_focused()
    # The map is a single tab stop.
    page.keyboard.press("Tab")
    expect(page.get_by_role("group", name="Table of traffic by pair")).to_be_focused()


def test_a_filtered_view_can_be_shared_and_left_by_going_back(page, context, fleet):
    sign_in(page, fleet.url, ADMIN)
    live(page)
    rows = page.locator("#instances tr")
    expect(rows).to_have_count(4)
    page.get_by_role("combobox", name="Role").select_option("decode")
    expect(rows).to_have_count(2)
    page.get_by_label("Name").fill("CODE-1")
    expect(rows).to_have_count(1)
    expect(page.locator("#instances-note")).to_have_text("1 of 4 registered")
    assert page.url.endswith("#role=decode&search=CODE-1") or "search=CODE-1" in page.url
    page.reload()
    expect(rows).to_have_count(1)
    expect(page.get_by_label("Name")).to_have_value("CODE-1")
    page.go_back()
    expect(rows).to_have_count(2)
    page.goto(f"{fleet.url}/#zone=eu-1b")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="everything").click()
    expect(rows).to_have_count(4)
    page.goto(f"{fleet.url}/#search=nobody")
    expect(page.locator("#map-note")).to_have_text("no instance matches")


def test_a_monitor_token_is_offered_no_action(page, fleet):
    sign_in(page, fleet.url, MONITOR)
    live(page)
    dialog = open_dialog(page, "decode-0")
    expect(dialog.locator("#may-not")).to_have_text("wall has monitor; drain and role take admin.")
    expect(dialog.get_by_role("button", name="Drain")).to_be_hidden()
    expect(dialog.get_by_role("button", name="Change role")).to_be_hidden()


def test_the_progress_of_a_weight_update_is_shown(page, fleet, packages):
    sign_in(page, fleet.url, ADMIN)
    live(page)
    expect(page.locator("#updates-note")).to_have_text("none was announced")
    credentials = Credentials(token=TRAINER)
    with SyncControlPlaneClient(fleet.url, credentials=credentials) as client:
        update = AnnounceUpdate(
            update_id="u-7",
            model=fleet.instances()["decode-0"].model,
            version=7,
            instances=("decode-0", "decode-1"),
        )
        client.announce_weight_update(update)
        row = page.locator("#updates tr")
        expect(row).to_contain_text("u-7")
        expect(row).to_have_text(re.compile("7staging0 of 20 of 20"))
        news = PartReport(instance_id="decode-0", state=PartState.COMMITTED, pause_seconds=0.25)
        client.report_weight_update("u-7", ReportUpdate(instances=(news,)))
        expect(row).to_have_text(re.compile("7staging1 of 21 of 20250 ms"))
        client.decide_weight_update("u-7", Decision.ABORT)
        expect(row).to_contain_text("weight-update-aborted: it was decided to abort it")
    assert barriers(page, packages) == []


def test_the_role_button_changes_the_role_of_a_real_worker(page, fleet):
    sign_in(page, fleet.url, ADMIN)
    live(page)
    dialog = open_dialog(page, "decode-1")
    for role in ("prefill", "decode"):
        dialog.get_by_role("combobox", name="Role").select_option(role)
        dialog.get_by_role("button", name="Change role").click()
        expect(dialog.locator("#outcome")).to_have_text(f"decode-1 takes the role {role}")
        expect(dialog.locator("#instance-facts div", has_text="role")).to_have_text(f"role{role}")
        assert fleet.instances()["decode-1"].role == role


def test_the_drain_button_drains_a_real_worker(page, fleet):
    sign_in(page, fleet.url, ADMIN)
    live(page)
    with Requests(fleet.router.url, at_once=2):
        # A worker with a request takes long enough to be seen draining.
        expect(page.locator("#transfers")).to_contain_text("prefill-1 →")
        dialog = open_dialog(page, "prefill-1")
        dialog.get_by_label("Deadline in seconds").fill("60")
        dialog.get_by_role("button", name="Drain").click()
        expect(dialog.locator("#outcome")).to_have_text(
            re.compile("prefill-1 (drains|has left the fleet)")
        )
        told = fleet.instances().get("prefill-1")
        assert told is None or told.state is InstanceState.DRAINING
        fleet.left("prefill-1", 120)
        expect(dialog.locator("#outcome")).to_have_text("prefill-1 has left the fleet")
        expect(dialog.get_by_role("button", name="Drain")).to_be_disabled()
    assert "prefill-1" not in fleet.instances()
    page.keyboard.press("Escape")
    expect(page.locator("#instances tr")).to_have_count(3)
    expect(tile(page, "prefill-1")).to_have_count(0)


def test_a_lost_control_plane_shows_as_stale_and_recovers(page, fleet, packages):
    sign_in(page, fleet.url, ADMIN)
    live(page)
    rows = page.locator("#instances tr")
    there = len(fleet.instances())
    expect(rows).to_have_count(there)
    fleet.kill(CONTROL_PLANE)
    stale = page.locator("#stale")
    expect(page.locator("#connection")).to_have_text("Stale")
    expect(stale).to_have_text(re.compile(r"^Stale: the control plane .* This is from .* s ago"))
    expect(page.get_by_role("status").first).to_have_text(re.compile("^Stale: the control plane"))
    expect(rows).to_have_count(there)  # the last known ones
    assert barriers(page, packages) == []
    dialog = page.get_by_role("dialog")
    page.locator("#instances").get_by_role("button", name="decode-0").click()
    expect(dialog.locator("#outcome")).to_contain_text("no longer current")
    page.keyboard.press("Escape")
    fleet.start_control_plane()
    live(page)
    expect(stale).to_be_hidden()
    # The new process knows no instance, but its workers register again.
    expect(rows).to_have_count(there)


@pytest.mark.parametrize(
    ("vendored", "published"),
    [
        ("uPlot.esm.js", "dist/uPlot.esm.js"),
        ("uPlot.min.css", "dist/uPlot.min.css"),
        ("LICENSE-uPlot", "LICENSE"),
    ],
)
def test_vendored_files_equal_those_of_npm(packages, vendored, published):
    from kvxfer.api.routes.page import FOLDER

    ours = (FOLDER / "vendor" / vendored).read_bytes()
    assert ours == (packages / "uplot" / published).read_bytes()
