"""A browser, and a fleet behind the page, for `make test SUITE=page`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .fleet import Zones

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

HERE = Path(__file__).parent
# The folder in which `npm ci` has put the packages of package.json.
PACKAGES = os.environ.get("KVXFER_PAGE_PACKAGES", "")
CHROMIUM = os.environ.get("KVXFER_CHROMIUM", "/usr/bin/chromium")
# The cores of a test machine are busy; what is tested is the result, not the speed.
PATIENCE = 90.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            if not PACKAGES:
                item.add_marker(pytest.mark.skip(reason="run by `make test SUITE=page`"))


@pytest.fixture(scope="session")
def packages() -> Path:
    return Path(PACKAGES)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE * 1000)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab in which no script fails and nothing breaks the content security policy."""
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None,
    )
    yield page
    assert not wrong


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zones]:
    with Zones(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet
