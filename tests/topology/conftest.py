from pathlib import Path

import pytest

from tests.topology.hosts import SysfsBuilder


@pytest.fixture
def sysfs(tmp_path: Path) -> SysfsBuilder:
    return SysfsBuilder(tmp_path / "sys")
