"""The scaling file: what it may contain, and one clear error for each invalid value."""

from __future__ import annotations

import sys

import pytest

from kvxfer.errors import InvalidArgument, NotBuilt
from kvxfer.scheduler.scaling.policy import ScalingPolicy
from kvxfer.scheduler.scaling.policy_file import (
    KubernetesConfig,
    ProcessesConfig,
    parse_scaling_file,
    read_bundled_policy,
    read_scaling_file,
)

YAML = """
model: llama
interval: 5
prefill:
  max: 12
  latency: 0.4
  tokens_per_second: 20000
decode: {min: 2, requests: null}
backend:
  kind: kubernetes
  namespace: llm
  prefill: {name: prefill}
  decode:
    {group: leaderworkerset.x-k8s.io, version: v1, plural: leaderworkersets, name: decode}
"""
TOML = """
model = "llama"
[prefill]
max = 12
[backend]
kind = "processes"
arguments = ["--blocks", "64"]
"""


def test_yaml(tmp_path):
    file = tmp_path / "scaling.yaml"
    file.write_text(YAML)
    scaling = read_scaling_file(file)
    assert (scaling.model, scaling.interval) == ("llama", 5)
    assert (scaling.prefill.max, scaling.prefill.latency) == (12, 0.4)
    assert (scaling.decode.min, scaling.decode.requests) == (2, None)
    assert isinstance(scaling.backend, KubernetesConfig)
    assert scaling.backend.prefill.plural == "deployments"
    assert scaling.backend.decode.group == "leaderworkerset.x-k8s.io"


def test_toml(tmp_path):
    file = tmp_path / "scaling.toml"
    file.write_text(TOML)
    scaling = read_scaling_file(file)
    assert scaling.prefill.max == 12
    assert scaling.backend == ProcessesConfig(arguments=("--blocks", "64"))


def test_empty_file_is_the_default_policy(tmp_path):
    file = tmp_path / "scaling.yaml"
    file.write_text("# nothing\n")
    scaling, default = read_scaling_file(file), ScalingPolicy()
    assert [getattr(scaling, name) for name in default.__struct_fields__] == [
        getattr(default, name) for name in default.__struct_fields__
    ]
    assert scaling.backend is None


def test_bundled_policy_can_be_read():
    assert read_bundled_policy().prefill.tokens_per_second == 20_000


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"prefill": {"min": 0}}, "prefill: min is 0; write 1 or more"),
        ({"prefill": {"min": 5, "max": 4}}, "prefill: max is 4; write 5 or more, as min is"),
        ({"prefill": {"min": "two"}}, "prefill.min is 'two': expected `int`, got `str`"),
        ({"prefill": {"min": True}}, "prefill.min is True: expected `int`, got `bool`"),
        ({"prefill": {"latency": 0}}, "prefill: latency is 0.0; write a number above 0"),
        ({"decode": {"latency": float("nan")}}, "decode: latency is nan; write a number above 0"),
        ({"decode": {"occupancy": 80}}, "decode: occupancy is 80.0; write above 0, at most 1"),
        ({"decode": {"utilisation": 0}}, "decode: utilisation is 0.0; write above 0, at most 1"),
        ({"decode": {"backlog": -1}}, "decode: backlog is -1.0; write a number above 0"),
        ({"decode": 3}, "decode is 3: expected `object`, got `int`"),
        ({"interval": 0}, "interval is 0.0; write a number above 0"),
        ({"tolerance": 1}, "tolerance is 1.0; write from 0 to below 1"),
        ({"step_up": 0}, "step_up is 0; write 1 or more"),
        ({"cooldown_up": -5}, "cooldown_up is -5.0; write 0 or more seconds"),
        ({"stable_down": float("inf")}, "stable_down is inf; write 0 or more seconds"),
        ({"prefill": {"maximum": 4}}, "prefill.maximum is not known; docs/scaling.md"),
        ({"prefil": {}}, "prefil is not known; docs/scaling.md"),
        ({"backend": {"kind": "nomad"}}, "backend.kind is 'nomad': write kubernetes or processes"),
        ({"backend": {"kind": "kubernetes"}}, "backend"),
        (
            {"backend": {"kind": "processes", "drain_seconds": -1}},
            "backend: drain_seconds is -1.0; write 0 to 86400",
        ),
        (
            {
                "backend": {
                    "kind": "kubernetes",
                    "prefill": {"name": "a/b"},
                    "decode": {"name": "d"},
                }
            },
            "backend.prefill: name is 'a/b'; write a name as Kubernetes has them",
        ),
        ({"worker_model": {"itl_base": 0}}, "worker_model: itl_base is 0.0; write a number above"),
        ([1], "the file is [1]: expected `object`, got `array`"),
    ],
)
def test_invalid_value_is_one_clear_error(document, words):
    with pytest.raises(InvalidArgument) as refused:
        parse_scaling_file("scaling.yaml", document)
    assert str(refused.value).startswith("scaling.yaml: ")
    assert words in str(refused.value)
    assert "$" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("s.yaml", "prefill: [", "is not YAML"),
        ("s.toml", "prefill = [", "is not TOML"),
        ("s.yaml", "\udce4", "cannot be read"),
    ],
)
def test_file_that_cannot_be_read(tmp_path, name, text, words):
    file = tmp_path / name
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InvalidArgument, match=words):
        read_scaling_file(file)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"nowhere.yaml cannot be read"):
        read_scaling_file(tmp_path / "nowhere.yaml")


def test_yaml_without_pyyaml_names_its_install_command(tmp_path, monkeypatch):
    file = tmp_path / "scaling.yaml"
    file.write_text(YAML)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(NotBuilt, match=r"pip install 'kvxfer\[server\]', or write TOML"):
        read_scaling_file(file)
