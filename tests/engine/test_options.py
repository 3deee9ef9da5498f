"""The options of an engine: each is said once, and a wrong one is refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import Engine, EngineOptions
from kvxfer.engine.native import native
from kvxfer.engine.options import native_fabrics
from kvxfer.errors import InvalidArgument

pytestmark = pytest.mark.native

KEY = "a cluster key for the tests"
OPERATIONS = Path(__file__).parents[2] / "docs/operations.md"


def test_python_documents_what_the_engine_takes() -> None:
    of_engine = set(native.OPTION_NAMES) - native_fabrics(None).keys() - {"cluster_key"}
    assert EngineOptions.__optional_keys__ == of_engine | {"fabrics"}


def test_operations_lists_every_option() -> None:
    _, _, rest = OPERATIONS.read_text().partition("\n| `Engine(…)` | default | |\n")
    rows, _, _ = rest.partition("\n\n")
    cells = [row.split("|")[1] for row in rows.splitlines()[1:]]
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(EngineOptions.__optional_keys__)


@pytest.mark.parametrize(
    ("option", "value", "refusal"),
    [
        ("cluster_key", None, "cluster_key is neither bytes nor text; pass bytes or a str"),
        ("name", 5, "name is 5; pass a str"),
        ("port", 65536, "port is 65536; pass an int from 0 to 65535"),
        ("port", "80", "port is '80'; pass an int from 0 to 65535"),
        ("lanes", -1, "lanes is -1; pass an int from 0 to 4294967295"),
        ("lanes", 65, "lanes is 65; use 1 to 64"),
        ("lanes", 2.5, "lanes is 2.5; pass an int from 0 to 4294967295"),
        ("window_bytes", -1, "window_bytes is -1; pass an int from 0 to 18446744073709551615"),
        ("nics", "mlx5_0", "nics is 'mlx5_0'; pass a list, each item a str"),
        ("cpus", [0, -1], r"cpus is [0, -1]; pass a list, each item an int from 0 to 4294967295"),
        ("ofi_strict", "yes", "ofi_strict is 'yes'; pass True or False"),
        ("peer_timeout", "soon", "peer_timeout is 'soon'; pass a number of seconds"),
        ("peer_timeout", float("nan"), "peer_timeout is nan s; pass 0 to 1e9 seconds"),
        ("spin", -1, "spin is -1.000000 s; pass 0 to 1e9 seconds"),
    ],
)
def test_a_wrong_value_is_refused_by_name(option: str, value: Any, refusal: str) -> None:
    options: Any = {"cluster_key": KEY, option: value}
    with pytest.raises(InvalidArgument, match=re.escape(refusal)):
        Engine(**options)


@pytest.mark.parametrize("key", [["secret"], "a secret that is no text: \ud800"])
def test_a_wrong_cluster_key_is_not_in_the_error(key: Any) -> None:
    with pytest.raises(InvalidArgument) as raised:
        Engine(cluster_key=key)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("option", ["prot", "local", "null"])
def test_an_unknown_option_is_a_type_error(option: str) -> None:
    options: Any = {"cluster_key": KEY, option: True}
    with pytest.raises(TypeError, match=f"'{option}'"):
        Engine(**options)


def test_the_engine_knows_which_use_of_a_fabric_it_is_asked_for() -> None:
    with pytest.raises(native.Error, match="verbs is 'always'; pass 'never', 'if_available' or"):
        native.EngineOptions(verbs="always")


async def test_values_of_numpy_and_tuples_are_taken() -> None:
    lanes: Any = np.int64(3)
    async with Engine(
        cluster_key=KEY.encode(),
        name="options",
        advertise=None,
        fabrics=("tcp",),
        lanes=lanes,
        cpus=(),
        peer_timeout=2,
    ) as engine:
        assert (engine.name, engine.fabrics) == ("options", ("tcp",))
        assert engine.address.startswith("kvx://127.0.0.1:")


def test_every_time_is_in_seconds() -> None:
    with pytest.raises(InvalidArgument, match="peer_timeout at least twice"):
        Engine(cluster_key=KEY, heartbeat_interval=0.5, peer_timeout=0.9)
    assert native.DEFAULT_PEER_TIMEOUT == 0.7
