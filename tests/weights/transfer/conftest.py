from __future__ import annotations

import pytest


@pytest.fixture(params=["local", "tcp"])
def fabric(request: pytest.FixtureRequest) -> str:
    return str(request.param)
