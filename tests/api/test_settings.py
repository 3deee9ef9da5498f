import pytest

from kvxfer.api.settings import Settings
from kvxfer.errors import InvalidArgument


def test_short_cluster_key_is_refused():
    with pytest.raises(InvalidArgument, match="at least 16"):
        Settings(cluster_key=b"short")


@pytest.mark.parametrize("name", ["transfer_seconds", "keepalive_seconds", "retry_after_seconds"])
@pytest.mark.parametrize("value", [0, -1])
def test_duration_that_is_none_is_refused_by_name(name, value):
    with pytest.raises(InvalidArgument, match=f"{name} is {value}"):
        Settings(cluster_key=bytes(16), **{name: value})


def test_cluster_key_is_not_shown():
    assert "secret" not in repr(Settings(cluster_key=b"a secret of 24 bytes...."))
