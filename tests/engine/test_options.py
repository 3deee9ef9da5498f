"""The options of an engine: each is documented, and the error for a wrong one names it."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer import Engine, EngineOptions
from kvxfer.engine.native import native
from kvxfer.engine.operator_options import (
    OPERATOR_OPTIONS,
    OperatorOptions,
    engine_options,
    parse_options,
    read_options,
)
from kvxfer.engine.options import native_fabrics
from kvxfer.errors import InvalidArgument
from tests.topology import machines

pytestmark = pytest.mark.native

KEY = "a cluster key for the tests"
OPTIONS_PAGE = Path(__file__).parents[2] / "docs/engine-options.md"


def test_python_documents_what_the_engine_takes() -> None:
    apart = {"cluster_key", "thread", "more_nics", *native_fabrics(None)}
    assert EngineOptions.__optional_keys__ == set(native.OPTION_NAMES) - apart | {"fabrics"}


def test_the_page_of_engine_options_lists_every_option() -> None:
    _, _, rest = OPTIONS_PAGE.read_text().partition("\n| `Engine(…)` | default | |\n")
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


@pytest.mark.parametrize("option", ["prot", "local", "thread"])
def test_an_unknown_option_is_refused_by_name(option: str) -> None:
    options: Any = {"cluster_key": KEY, option: True}
    with pytest.raises(InvalidArgument, match=f"Engine has no option '{option}'"):
        Engine(**options)


def test_an_option_like_an_unknown_one_is_named() -> None:
    options: Any = {"cluster_key": KEY, "peer_timeuot": 1}
    with pytest.raises(InvalidArgument, match="did you mean 'peer_timeout'"):
        Engine(**options)


@pytest.mark.parametrize("fabrics", ["tcp", 5, b"tcp"])
def test_fabrics_are_a_list(fabrics: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"fabrics is .*; pass a list of names, such as"):
        Engine(cluster_key=KEY, fabrics=fabrics)


def test_a_wrong_use_of_a_fabric_is_refused() -> None:
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


# --- settings of an operator -----------------------------------------------------------------

LOG = logging.getLogger("tests.options")


def test_an_operator_may_set_every_option_but_name_and_port() -> None:
    declared = EngineOptions.__optional_keys__ | {"exclude_nics"}
    assert set(OPERATOR_OPTIONS) == declared - {"name", "port"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ({"lanes": "3"}, {"lanes": 3}),
        ({"nics": "mlx5_0, mlx5_1,"}, {"nics": ["mlx5_0", "mlx5_1"]}),
        ({"cpus": "0,1"}, {"cpus": [0, 1]}),
        ({"peer_timeout": "2"}, {"peer_timeout": 2.0}),
        ({"ofi_strict": "1"}, {"ofi_strict": True}),
        ({"ofi_strict": "false"}, {"ofi_strict": False}),
        ({"advertise": "10.0.0.7"}, {"advertise": "10.0.0.7"}),
        ({"lanes": "", "fabrics": None}, {}),
    ],
)
def test_text_means_what_json_does(text: dict[str, str | None], value: dict[str, Any]) -> None:
    assert parse_options(text, str) == read_options(value, str) == value


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"lanes": "3"}, "--lanes is '3'; pass a whole number"),
        ({"peer_timeout": True}, "--peer_timeout is True; pass a number"),
        ({"nics": "mlx5_0"}, "--nics is 'mlx5_0'; pass a list, each item text"),
        ({"cpus": ["a"]}, "--cpus is ['a']; pass a list, each item a whole number"),
        ({"ofi_strict": 1}, "--ofi_strict is 1; pass true or false"),
        ({"lanes": -1}, "--lanes is refused: lanes is -1; pass an int from 0 to"),
        ({"fabrics": ["rdma"]}, "--fabrics is refused: fabrics is ['rdma']; choose from"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(given: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(refusal)):
        read_options(given, "--{}".format)


GPU = "0000:98:00.0"
EVERY = {"nics": ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]}


@pytest.mark.parametrize(
    ("machine", "given", "options"),
    [
        ("server", {}, {"nics": ["mlx5_3"]}),
        ("server", {"lanes": 4, "cpus": [1]}, {"lanes": 4, "cpus": [1], "nics": ["mlx5_3"]}),
        ("server", {"nics": ["*"]}, EVERY),
        ("server", {"nics": ["mlx5_9"]}, {"nics": ["mlx5_9"]}),
        ("server", {"exclude_nics": ["mlx5_3"]}, {"nics": ["mlx5_0"]}),
        ("server", {"exclude_nics": ["*"]}, {"fabrics": ["local", "tcp"]}),
        ("server", {"exclude_nics": ["*"], "fabrics": ["tcp"]}, {"fabrics": ["tcp"]}),
        ("server", {"fabrics": ["tcp"]}, {"fabrics": ["tcp"]}),
        ("server", {"fabrics": ["ofi"]}, {"fabrics": ["ofi"]}),  # the server's NICs are for verbs
        ("server", {"fabrics": ["ofi"], "exclude_nics": ["*"]}, {"fabrics": ["ofi"]}),
        ("server", {"ofi_provider": "tcp"}, {"ofi_provider": "tcp"}),
        ("laptop", {}, {}),
        ("laptop", {"nics": ["*"], "exclude_nics": ["mlx5_*"]}, {}),
        ("nothing", {}, {}),
    ],
)
def test_an_engine_gets_the_nics_nearest_to_its_gpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    given: OperatorOptions,
    options: EngineOptions,
) -> None:
    monkeypatch.setattr(native, "BUILT_FABRICS", ("local", "tcp", "verbs", "ofi"))
    root = tmp_path if machine == "nothing" else machines.write(machine, tmp_path)
    assert engine_options(given, GPU, LOG, root=root) == options


def test_nics_of_a_fabric_that_is_not_built_are_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "BUILT_FABRICS", ("local", "tcp"))
    caplog.set_level(logging.INFO, LOG.name)
    assert engine_options({}, None, LOG, root=machines.write("server", tmp_path)) == {}
    [said] = caplog.messages
    assert said.startswith("no NIC is chosen: /sys shows none that can be used; ")
    assert said.endswith("; not mlx5_0, mlx5_1, mlx5_2, mlx5_3 (fabric verbs is not used)")


def test_a_fabric_that_is_named_needs_a_nic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "BUILT_FABRICS", ("local", "tcp", "verbs", "ofi"))
    given: OperatorOptions = {"exclude_nics": ["*"], "fabrics": ["verbs", "tcp"]}
    with pytest.raises(
        InvalidArgument, match="leaves no NIC of this host, and fabrics names verbs"
    ):
        engine_options(given, None, LOG, root=machines.write("server", tmp_path))


def test_host_memory_gets_the_nics_near_cpus_that_the_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "BUILT_FABRICS", ("local", "tcp", "verbs", "ofi"))
    root = machines.write("server", tmp_path)
    for cpu, name in ((3, "mlx5_0"), (40, "mlx5_3")):
        assert engine_options({}, None, LOG, root=root, running_on={cpu}) == {"nics": [name]}
