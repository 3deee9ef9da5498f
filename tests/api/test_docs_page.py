"""The API's page at /docs, which has to work without internet."""

from __future__ import annotations

import re


async def test_the_api_page_loads_from_the_control_plane_alone(api) -> None:
    page = await api.get("/docs")
    assert page.status_code == 200
    urls = re.findall(r"""(?:href|src|url)\s*[=:]\s*['"]([^'"]+)""", page.text)
    assert len(urls) >= 4, page.text
    for url in urls:
        assert url.startswith("/"), url
        loaded = await api.get(url)
        assert loaded.status_code == 200, url
        assert loaded.content, url
