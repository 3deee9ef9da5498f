"""The page's files: all exist, nothing is inline or from another server. tests/page tests the page
in a browser."""

from __future__ import annotations

import hashlib
import re

import pytest

from kvxfer.api.routes.page import FOLDER

from .conftest import problem

OWN = sorted(path for path in FOLDER.glob("*") if path.is_file())
# The SHA-256 of files of npm's uplot 1.6.32; `make test SUITE=page` compares with the package.
VENDORED = {
    "vendor/uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "vendor/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "vendor/LICENSE-uPlot": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


async def test_headers_of_the_page_admit_nothing_from_elsewhere(api):
    answer = await api.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_a_file_that_the_browser_has_is_not_sent_again(api):
    etag = (await api.get("/page/main.js")).headers["etag"]
    again = await api.get("/page/main.js", headers={"If-None-Match": etag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
    other = await api.get("/page/main.js", headers={"If-None-Match": '"other"'})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/none.js", "/page/", "/page/../routes/page.py", "/page/%2e%2e/app.py"]
)
async def test_a_path_that_is_no_file_of_the_page_is_not_found(api, path):
    problem(await api.get(path), 404, "not-found")


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
async def test_every_file_that_the_page_names_exists(api, path):
    text = path.read_text()
    named = re.findall(r'(?:href|src|from|import) ?=? ?"([^"#]+)"', text)
    for name in named:
        if name.startswith("./"):
            name = f"/page/{name[2:]}"
        assert name.startswith("/"), f"{path.name} names {name}, which is on another server"
        answer = await api.get(name)
        assert answer.status_code == 200, f"{path.name} names {name}"
        if name.endswith(".js"):
            assert answer.headers["content-type"] == "text/javascript; charset=utf-8"


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_nothing_is_inline_and_no_text_becomes_markup(path):
    text = path.read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son[a-z]+=", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


@pytest.mark.parametrize("name", VENDORED)
def test_vendored_files_are_as_published(name):
    assert hashlib.sha256((FOLDER / name).read_bytes()).hexdigest() == VENDORED[name]


def test_every_element_that_scripts_look_for_is_in_the_page():
    ids = set(re.findall(r'\bid="([^"]+)"', (FOLDER / "index.html").read_text()))
    for script in FOLDER.glob("*.js"):
        asked = set(re.findall(r'byId\("([^"]+)"\)', script.read_text()))
        assert asked <= ids, script.name
