"""`kvxfer worker` as a process: its place in the fleet, its stop, and why it refuses to start."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
import transformers

from kvxfer.client import ControlPlaneRegistrar
from kvxfer.reference.checkpoint import load_config
from kvxfer.reference.shards import WHOLE, holdings_of
from kvxfer.reference.weights import seeded_weights
from kvxfer.weights.trainer import Trainer
from verify.polling import wait_until
from verify.processes.programs import Server, clean_environment, kvxfer

pytestmark = pytest.mark.native

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
        )
    ).save_pretrained(folder)
    return folder


def environment(**variables: str) -> dict[str, str]:
    return clean_environment(**{"KVXFER_CLUSTER_KEY": KEY, **variables})


def started(*arguments: str | Path) -> Server:
    """Starts a kvxfer command and returns it when it is ready; it ends with its block."""
    command = kvxfer(*arguments, "--json")
    server = Server(str(arguments[0]), *command, environment=environment())
    try:
        server.ready()
    except BaseException:
        server.close()
        raise
    return server


@pytest.fixture(scope="module")
def control_plane() -> Iterator[str]:
    with started("serve", "--port", "0", "--lease-seconds", "6") as server:
        yield server.url


def refused(*arguments: str | Path, **variables: str) -> str:
    """Returns the error of a worker that must not start, on one line."""
    result = subprocess.run(
        kvxfer("worker", *arguments),
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def instances(control_plane: str) -> dict[str, Any]:
    listed = httpx2.get(f"{control_plane}/v1/instances").json()["instances"]
    return {instance["instance_id"]: instance for instance in listed}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_is_in_the_fleet_until_it_is_stopped(
    number: signal.Signals, control_plane: str, model: Path
) -> None:
    with started(
        *("worker", "--role", "decode", "--control-plane", control_plane, "--model", model),
        *("--instance-id", f"decode-{number.name}", "--blocks", "40", "--fabrics", "tcp"),
        *("--label", "zone=eu-1a", "--label", "rack=a=7"),
        *("--engine-option", "tuning.lanes=3", "--engine-option", "exclude_nics=mlx5_8,mlx5_bond*"),
    ) as worker:
        said = worker.ready()
        assert said["instance_id"] == f"decode-{number.name}"
        registered = instances(control_plane)[said["instance_id"]]
        assert registered["state"] == "ready"
        assert registered["labels"] == {
            "host": socket.gethostname(),
            "zone": "eu-1a",
            "rack": "a=7",
        }
        assert registered["role"] == said["role"] == "decode"
        assert registered["model"] == said["model"] == "tiny-llama"
        assert registered["http_address"] == said["http_address"]
        assert registered["engine_address"] == said["engine_address"]
        assert registered["num_blocks"] == 40
        assert registered["fabrics"] == ["tcp"]
        assert registered["layout"]["num_layers"] == 2
        assert registered["layout"]["head_size"] == 16
        health = httpx2.get(f"{said['http_address']}/healthz").json()
        assert (health["status"], health["free_blocks"]) == ("ok", 40)
        worker.stop(number)
        # The worker has deregistered: its lease of 6 s, renewed every 2 s, would still hold.
        assert said["instance_id"] not in instances(control_plane)


def test_a_drained_worker_that_is_stopped_while_it_leaves_exits_with_0(
    control_plane: str, model: Path
) -> None:
    with started(
        *("worker", "--role", "prefill", "--control-plane", control_plane, "--model", model),
        *("--instance-id", "drained", "--blocks", "40"),
    ) as worker:
        url = f"{control_plane}/v1/instances/drained"
        assert httpx2.post(f"{url}/drain", json={"deadline_seconds": 0}).status_code == 202
        wait_until(lambda: httpx2.get(url).status_code != 200)

        def ended_by_signals() -> bool:
            worker.send(signal.SIGTERM)
            return worker.exit_code is not None

        wait_until(ended_by_signals, pause=0.01)
        assert worker.exit_code == 0


def test_a_worker_serves_the_weights_that_training_pushes(control_plane: str, model: Path) -> None:
    config = load_config(model)
    holdings = holdings_of(config, WHOLE, "bfloat16")
    pushed = seeded_weights(config, 5, dtype=torch.bfloat16)
    with (
        Trainer(
            holdings,
            lambda: pushed,
            rank=0,
            world_size=1,
            cluster_key=KEY,
            registrar=ControlPlaneRegistrar(config.name, url=control_plane, required=True),
        ) as trainer,
        started(
            *("worker", "--role", "decode", "--control-plane", control_plane, "--model", model),
            *("--instance-id", "updated", "--blocks", "40", "--fabrics", "tcp"),
            *("--weights-coordinator", trainer.coordinator, "--weights-dtype", "bfloat16"),
        ) as worker,
    ):
        said = worker.ready()
        trainer.wait_for(1, 60)
        [instance] = trainer.push(3).result(60).instances
        assert (instance.instance_id, instance.state) == ("updated", "committed")
        health = httpx2.get(f"{said['http_address']}/healthz").json()
        assert health["weights_version"] == 3
        assert health["weights_address"] == said["weights_address"]
        registered = instances(control_plane)["updated"]
        assert registered["identity"]["weights_version"] == 3
        assert registered["state"] == "ready"
        [told] = httpx2.get(f"{control_plane}/v1/weights/updates").json()["updates"]
        assert (told["version"], told["state"], told["decision"]) == (3, "committed", "commit")
        assert (told["instances"][0]["state"], told["instances"][0]["digest"]) == (
            "committed",
            instance.digest,
        )


def test_an_id_that_a_live_worker_has_is_refused(control_plane: str, model: Path) -> None:
    taken = ("--role", "prefill", "--control-plane", control_plane, "--instance-id", "one")
    with started("worker", *taken, "--model", model):
        error = refused(*taken, "--model", model)
    assert "error [instance-exists] two instances have the instance_id 'one'" in error


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        error = refused("--role", "prefill", "--port", port)
    assert error.startswith(f"error [address-in-use] port {port} on 127.0.0.1 is taken")


def test_a_foreign_host_is_refused() -> None:
    error = refused("--role", "prefill", "--host", "192.0.2.1")
    assert error.startswith("error [invalid-argument] host '192.0.2.1' is no address of")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    error = refused("--role", "prefill", "--model", tmp_path)
    assert error.startswith("error [invalid-argument]")
    assert "has no config.json" in error


def test_an_unknown_fabric_is_refused(model: Path) -> None:
    error = refused("--role", "prefill", "--model", model, "--fabrics", "pigeon")
    assert error.startswith("error [invalid-argument]")
    assert "pigeon" in error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--peer-timeout", "soon"], "--peer-timeout is 'soon'; pass a number"),
        (["--engine-option", "tuning.lanes=x"], "tuning.lanes is 'x'; pass a whole number"),
        (["--engine-option", "tuning.lanes=65"], "tuning.lanes is 65; use 1 to 64"),
        (["--engine-option", "lanes=4"], "is no setting of kvxfer; set --engine-option tuning.lan"),
        (["--engine-option", "cpus"], "--engine-option is 'cpus'; write it as NAME=VALUE"),
        (["--engine-option", "port=1"], "once for each of advertise, cpus, exclude_nics, "),
        (["--engine-option", "nics=a", "--engine-option", "nics=b"], "is 'nics=b'; write it as"),
    ],
)
def test_an_invalid_option_of_the_engine_is_refused(
    options: list[str], says: str, model: Path
) -> None:
    error = refused("--role", "prefill", "--model", model, *options)
    assert error.startswith("error [invalid-argument] ")
    assert says in error


@pytest.mark.parametrize("label", ["zone", "=a"])
def test_a_label_without_name_or_value_is_refused(label: str) -> None:
    assert "write it as NAME=VALUE" in refused("--role", "decode", "--label", label)


def test_a_missing_cluster_key_is_named() -> None:
    error = refused("--role", "prefill", KVXFER_CLUSTER_KEY="")
    assert error.startswith("error [invalid-argument] there is no cluster key")
