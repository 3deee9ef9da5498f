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
from kvxfer.engine.options import DEFAULT_PEER_TIMEOUT, EngineTuning, native_fabrics
from kvxfer.errors import InvalidArgument
from tests.topology import machines

pytestmark = pytest.mark.native

KEY = "a cluster key for the tests"


def test_python_documents_what_the_engine_takes() -> None:
    apart = {"cluster_key", "thread", "more_nics", "ofi_strict", *native_fabrics(None)}
    tuning = {f"tuning.{name}" for name in EngineTuning.__optional_keys__}
    named = EngineOptions.__optional_keys__ - {"fabrics", "tuning"}
    assert named | tuning == set(native.ENGINE_OPTIONS) - apart


@pytest.mark.parametrize(
    ("option", "value", "refusal"),
    [
        ("cluster_key", None, "cluster_key is neither bytes nor text; pass bytes or a str"),
        ("name", 5, "name is 5; pass a str"),
        ("port", 65536, "port is 65536; pass an int from 0 to 65535"),
        ("port", "80", "port is '80'; pass an int from 0 to 65535"),
        ("name", "n" * 129, "name is 129 bytes; use 0 to 128 bytes"),
        ("gid_index", 256, "gid_index is 256; use 0 to 255, or -1"),
        ("operation_timeout", 0, "operation_timeout is 0 s; use 1e-09 s or more"),
        ("nics", "mlx5_0", "nics is 'mlx5_0'; pass a list, each item a str"),
        ("cpus", [0, -1], r"cpus is [0, -1]; pass a list, each item an int from 0 to 4294967295"),
        ("ofi_strict", "yes", "ofi_strict is 'yes'; pass True or False"),
        ("peer_timeout", "soon", "peer_timeout is 'soon'; pass a number of seconds"),
        ("peer_timeout", float("nan"), "peer_timeout is nan s; pass 0 to 1e9 seconds"),
        ("tuning", 4, "tuning is 4; pass a dict, such as {'lanes': 4}"),
    ],
)
def test_a_wrong_value_is_refused_by_name(option: str, value: Any, refusal: str) -> None:
    options: Any = {"cluster_key": KEY, option: value}
    with pytest.raises(InvalidArgument, match=re.escape(refusal)):
        Engine(**options)


@pytest.mark.parametrize(
    ("option", "value", "refusal"),
    [
        ("lanes", -1, "lanes is -1; pass an int from 0 to 4294967295"),
        ("lanes", 65, "lanes is 65; use 1 to 64"),
        ("lanes", 2.5, "lanes is 2.5; pass an int from 0 to 4294967295"),
        ("window_bytes", -1, "window_bytes is -1; pass an int from 0 to 18446744073709551615"),
        ("window_bytes", 1 << 19, "window_bytes is 524288 bytes; use 1048576 bytes or more"),
        ("path_mtu", 128, "path_mtu is 128 bytes; use 256 to 4096 bytes, or 0"),
        ("ofi_endpoints", 0, "ofi_endpoints is 0; use 1 to 64"),
        ("heartbeat_interval", 61, "heartbeat_interval is 61 s; use 0.001 to 60 s"),
        ("path_timeout", 0.01, "path_timeout must be at least tuning.heartbeat_interval"),
        ("spin", -1, "spin is -1.000000 s; pass 0 to 1e9 seconds"),
    ],
)
def test_a_wrong_value_of_tuning_is_refused_by_name(option: str, value: Any, refusal: str) -> None:
    tuning: Any = {option: value}
    with pytest.raises(InvalidArgument, match=re.escape(f"tuning.{refusal}")):
        Engine(cluster_key=KEY, tuning=tuning)


@pytest.mark.parametrize("option", sorted(EngineTuning.__optional_keys__))
def test_an_option_of_tuning_beside_it_is_refused_with_its_place(option: str) -> None:
    options: Any = {"cluster_key": KEY, option: 1}
    refusal = f"Engine has no option '{option}'; pass tuning={{\"{option}\": …}}"
    with pytest.raises(InvalidArgument, match=re.escape(refusal)):
        Engine(**options)
    beside = f"--{option} is no setting of kvxfer; set --tuning.{option}"
    with pytest.raises(InvalidArgument, match=re.escape(beside)):
        read_options({option: 1}, "--{}".format)
    with pytest.raises(InvalidArgument, match=re.escape(beside)):
        parse_options({option: "1"}, "--{}".format)


def test_an_unknown_option_of_tuning_is_refused_by_name() -> None:
    tuning: Any = {"lane": 4}
    with pytest.raises(InvalidArgument, match=r"no option 'tuning\.lane'; did you mean 'lanes'"):
        Engine(cluster_key=KEY, tuning=tuning)
    with pytest.raises(InvalidArgument, match=r"--tuning.lane is no setting of kvxfer; there are"):
        read_options({"tuning": tuning}, "--{}".format)


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
        tuning={"lanes": lanes},
        cpus=(),
        peer_timeout=2,
    ) as engine:
        assert (engine.name, engine.fabrics) == ("options", ("tcp",))
        assert engine.address.startswith("kvx://127.0.0.1:")


def test_every_time_is_in_seconds() -> None:
    with pytest.raises(InvalidArgument, match="peer_timeout must be at least twice"):
        Engine(cluster_key=KEY, tuning={"heartbeat_interval": 0.5}, peer_timeout=0.9)
    assert DEFAULT_PEER_TIMEOUT == 0.7


# --- settings of an operator -----------------------------------------------------------------

LOG = logging.getLogger("tests.options")


def test_an_operator_may_set_every_option_but_name_and_port() -> None:
    declared = EngineOptions.__optional_keys__ | {"exclude_nics"}
    tuning = {f"tuning.{name}" for name in EngineTuning.__optional_keys__}
    assert set(OPERATOR_OPTIONS) == declared - {"name", "port", "tuning"} | tuning


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ({"tuning.lanes": "3", "tuning.spin": "1"}, {"tuning": {"lanes": 3, "spin": 1.0}}),
        ({"nics": "mlx5_0, mlx5_1,"}, {"nics": ["mlx5_0", "mlx5_1"]}),
        ({"cpus": "0,1"}, {"cpus": [0, 1]}),
        ({"peer_timeout": "2"}, {"peer_timeout": 2.0}),
        ({"tuning.memory_windows": "1"}, {"tuning": {"memory_windows": True}}),
        ({"tuning.memory_windows": "false"}, {"tuning": {"memory_windows": False}}),
        ({"advertise": "10.0.0.7"}, {"advertise": "10.0.0.7"}),
        ({"tuning.lanes": "", "fabrics": None}, {}),
    ],
)
def test_text_means_what_json_does(text: dict[str, str | None], value: dict[str, Any]) -> None:
    assert parse_options(text, str) == read_options(value, str) == value


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"tuning": {"lanes": "3"}}, "--tuning.lanes is '3'; pass a whole number"),
        ({"tuning": 3}, "--tuning is 3; pass an object, such as"),
        ({"peer_timeout": True}, "--peer_timeout is True; pass a number"),
        ({"nics": "mlx5_0"}, "--nics is 'mlx5_0'; pass a list, each item text"),
        ({"cpus": ["a"]}, "--cpus is ['a']; pass a list, each item a whole number"),
        (
            {"tuning": {"memory_windows": 1}},
            "--tuning.memory_windows is 1; pass true or false",
        ),
        (
            {"tuning": {"lanes": -1}},
            "--tuning.lanes is refused: tuning.lanes is -1; pass an int from 0 to",
        ),
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
        ("server", {"cpus": [1]}, {"cpus": [1], "nics": ["mlx5_3"]}),
        ("server", {"tuning": {"lanes": 4}}, {"tuning": {"lanes": 4}, "nics": ["mlx5_3"]}),
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
