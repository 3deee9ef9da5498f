from pathlib import Path

import pytest

from tests.topology.sysfs_builder import SysfsBuilder


@pytest.fixture
def sysfs(tmp_path: Path) -> SysfsBuilder:
    return SysfsBuilder(tmp_path / "sys")
