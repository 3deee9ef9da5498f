"""Actions of the tests on a page: sign in, find barriers, take a picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

expect = pytest.importorskip("playwright.sync_api", reason="run by `make test SUITE=page`").expect

IMAGES = Path(__file__).parents[2] / "docs" / "img"
_COLOURS = 256
_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def sign_in(page: Page, url: str, token: str) -> None:
    page.goto(url)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Sign in").click()


def live(page: Page) -> None:
    """Returns when the page follows the fleet."""
    expect(page.locator("#connection")).to_have_text("Live")


def shown_again(page: Page, times: int) -> None:
    """Returns when the page has updated its view of the fleet `times` times, once a second."""
    page.evaluate(
        """times => new Promise((shown) => new MutationObserver((_, observer) => {
            times -= 1;
            if (times > 0) return;
            observer.disconnect();
            shown();
        }).observe(document.getElementById("instances"), { subtree: true, childList: true,
            characterData: true, attributes: true }))""",
        times,
    )


def barriers(page: Page, packages: Path) -> list[str]:
    """Returns the violations of WCAG 2.2 AA and good practice that axe-core finds, a line each."""
    if not page.evaluate("'axe' in window"):
        page.evaluate((packages / "axe-core" / "axe.min.js").read_text())
    options = {"runOnly": {"type": "tag", "values": _RULES}}
    found: dict[str, Any] = page.evaluate("options => axe.run(document, options)", options)
    assert len(found["passes"]) > 15, "axe looked at nothing"
    return [
        f"{violation['id']}: {node['html'][:160]} ({node['failureSummary'][:300]})"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


def take_picture(page: Page, name: str, height: int) -> None:
    """Saves the top of the page as docs/img/NAME.png, with few colours to keep the file small."""
    from PIL import Image

    width = (page.viewport_size or {"width": 1280})["width"]
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate("scrollTo(0, 0)")
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled")))
    IMAGES.mkdir(parents=True, exist_ok=True)
    few = image.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
    few.save(IMAGES / f"{name}.png", optimize=True)
