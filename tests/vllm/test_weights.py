"""Updates of a live vLLM's weights, on CPUs: what its ranks want, and that it serves one version or
the other, never a mixture."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from transformers import AutoModelForCausalLM

from verify.processes.programs import Server, clean_environment
from verify.processes.vllm import servers
from verify.processes.vllm.servers import VLLM_PYTHON, vllm

from .conftest import CLUSTER_KEY, ask

pytestmark = [pytest.mark.native, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = {
    "PYTHONPATH": str(HERE),
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "KVXFER_CLUSTER_KEY": CLUSTER_KEY,
    "VLLM_SERVER_DEV_MODE": "1",
}
PROMPT = list(range(40, 200, 3))
VOCABULARY, HIDDEN, MLP = 500, 128, 256  # as tiny_llama.py makes it; 500 are padded to 512


def llama(folder: Path, seed: int) -> Path:
    """Makes a model whose vocabulary has to be padded, and returns its checkpoint."""
    made = folder / f"llama-{seed}"
    if not made.exists():
        maker = Path(servers.__file__).with_name("tiny_llama.py")
        options = ["--layers", "2", "--vocabulary", str(VOCABULARY), "--seed", str(seed)]
        subprocess.run([VLLM_PYTHON, str(maker), str(made), *options], check=True)
    return made


def other_model(folder: Path, kind: str, seed: int) -> Path:
    made = folder / f"{kind}-{seed}"
    maker = Path(servers.__file__).with_name("tiny_models.py")
    subprocess.run([VLLM_PYTHON, str(maker), kind, str(made), str(seed)], check=True)
    return made


def probe(model: Path, other: Path, ranks: int) -> dict[str, Any]:
    done = subprocess.run(
        [VLLM_PYTHON, str(HERE / "reload_probe.py"), str(model), str(other), str(ranks)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert told["recorded"] == told["before"], "recording has changed what is served"
    assert told["same_addresses"]
    return told


def llama_boxes(rank: int, ranks: int) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Returns whole shape, offset and shape of the box that a rank wants of each parameter: rows of
    column-parallel projections, columns of row-parallel ones, and the unpadded part of its share of
    the vocabulary."""
    share = 512 // ranks
    words = min(VOCABULARY, (rank + 1) * share) - rank * share
    boxes = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        boxes[name] = ([VOCABULARY, HIDDEN], [rank * share, 0], [words, HIDDEN])
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, rows in (
            ("self_attn.q_proj", 128),
            ("self_attn.k_proj", 64),
            ("self_attn.v_proj", 64),
            ("mlp.gate_proj", MLP),
            ("mlp.up_proj", MLP),
        ):
            mine = rows // ranks
            boxes[f"{at}{name}.weight"] = ([rows, HIDDEN], [rank * mine, 0], [mine, HIDDEN])
        for name, columns in (("self_attn.o_proj", 128), ("mlp.down_proj", MLP)):
            mine = columns // ranks
            boxes[f"{at}{name}.weight"] = ([HIDDEN, columns], [0, rank * mine], [HIDDEN, mine])
        for name in ("input_layernorm", "post_attention_layernorm"):
            boxes[f"{at}{name}.weight"] = ([HIDDEN], [0], [HIDDEN])
    return boxes | {"model.norm.weight": ([HIDDEN], [0], [HIDDEN])}


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_wants_its_shards_and_serves_what_was_staged(folder: Path, ranks: int) -> None:
    told = probe(llama(folder, 0), llama(folder, 1), ranks)
    for rank, boxes in enumerate(told["boxes"]):
        found = {name: tuple(box) for name, _, *box in boxes}
        assert found == llama_boxes(rank, ranks)
        assert {dtype for _, dtype, *_ in boxes} == {"float32"}
    missing, scales, narrow = told["lacking"]
    assert "model.layers.1.self_attn.qkv_proj.weight" in missing
    assert "model.layers.1.self_attn.k_proj.weight_scale_inv" in scales
    assert "model.layers.1.self_attn.k_proj.weight is sent in torch.float8_e4m3fn" in narrow
    assert told["loaded"] == told["afresh"] != told["before"]


def test_an_output_that_is_tied_to_the_embedding_is_renewed(folder: Path) -> None:
    models = [other_model(folder, "sliding", seed) for seed in (0, 1)]
    told = probe(*models, 1)
    assert not any(name == "lm_head.weight" for name, *_ in told["boxes"][0])
    # Such a model repeats its last token if output and embedding are of one version.
    assert told["loaded"] == told["afresh"]


def test_experts_that_vllm_does_not_renew_are_refused(folder: Path) -> None:
    model = other_model(folder, "experts", 0)
    told = probe(model, model, 2)
    gates = [
        {name: tuple(box) for name, _, *box in boxes}[
            "model.layers.0.mlp.experts.3.down_proj.weight"
        ]
        for boxes in told["boxes"]
    ]
    assert gates == [([128, 64], [0, 0], [128, 32]), ([128, 64], [0, 32], [128, 32])]
    assert "model.layers.0.mlp.experts" in told["refused"]


class Trainer:
    """A process of weight_trainer.py."""

    def __init__(
        self, checkpoint: Path, server: Server, rank: int = 0, ranks: int = 1, store: str = ""
    ) -> None:
        program = [VLLM_PYTHON, str(HERE / "weight_trainer.py"), str(checkpoint), server.url]
        self._process = subprocess.Popen(
            [*program, str(rank), str(ranks), store],
            env=clean_environment(**ENVIRONMENT),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def do(self, order: str) -> dict[str, Any]:
        """Gives an order and returns the answer, or how the process ended if the order killed
        it."""
        self.tell(order)
        return self.answer()

    def tell(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()

    def well(self, order: str) -> None:
        assert self.do(order) == {}

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        return {"ended": self._process.wait(30)}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def greedy(checkpoint: Path) -> list[int]:
    """Returns the tokens of Hugging Face's model."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    said = model.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
    return [int(token) for token in said[0, len(PROMPT) :]]


@pytest.fixture(scope="module")
def tokens(folder: Path) -> list[list[int]]:
    """The answers of three checkpoints to the prompt."""
    found = [greedy(llama(folder, seed)) for seed in range(3)]
    assert len({tuple(each) for each in found}) == 3
    return found


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with begun(folder, 2) as started:
        started.serves("/health")
        yield started


def begun(folder: Path, ranks: int) -> Server:
    return vllm(
        f"live-{ranks}",
        folder,
        llama(folder, 0),
        "--weight-transfer-config",
        '{"backend": "kvxfer"}',
        "--worker-extension-cls",
        "weight_faults.Faults",
        "--tensor-parallel-size",
        str(ranks),
        variables=ENVIRONMENT,
    )


def answer(server: Server) -> list[int]:
    said = ask(server, PROMPT)
    assert said.is_success, said.text
    return list(said.json()["choices"][0]["token_ids"])


def version(server: Server) -> str:
    return str(httpx2.get(server.url + "/weight_info", timeout=30).json()["weight_version"])


def call(server: Server, method: str) -> Any:
    body = {"method": method}
    said = httpx2.post(server.url + "/collective_rpc", json=body, timeout=60)
    assert said.is_success, said.text
    return said.json()["results"]


class Asking:
    """A client that asks all the time, in a thread."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self.answers: list[tuple[str, list[int]]] = []
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.is_set():
            said = ask(self._server, PROMPT)
            if said.is_success:
                [choice] = said.json()["choices"]
                self.answers.append((choice["finish_reason"], list(choice["token_ids"])))


def test_a_live_instance_serves_one_version_or_the_next(
    folder: Path, server: Server, tokens: list[list[int]]
) -> None:
    addresses = call(server, "addresses")
    assert answer(server) == tokens[0]
    trainer = Trainer(llama(folder, 1), server)
    try:
        trainer.well("init 0")
        with Asking(server) as asking:
            trainer.well("send wait")
        assert (answer(server), version(server)) == (tokens[1], "1")
        for reason, said in asking.answers:
            assert (reason, said) in [("length", tokens[0]), ("length", tokens[1])]

        # A worker refuses its pin: the others have pinned, and none applies. vLLM still matches
        # answers to calls.
        trainer.well(f"load {llama(folder, 2)}")
        refused = trainer.do("refuse")
        assert "WeightUpdateAborted" in refused["error"], refused
        assert call(server, "addresses") == addresses
        assert (answer(server), version(server)) == (tokens[1], "1")

        with Asking(server) as asking:
            trainer.well("send abort")
        assert (answer(server), version(server)) == (tokens[2], "2")
        for reason, said in asking.answers:
            if reason == "length":
                assert said in (tokens[1], tokens[2])
            else:
                assert (reason, said) == ("abort", tokens[1][: len(said)])

        # A trainer vanishes between the pin and the commit, and another one follows.
        trainer.well(f"load {llama(folder, 0)}")
        assert trainer.do("vanish") == {"ended": -9}
        assert version(server) == "2"
    finally:
        trainer.close()
    assert call(server, "addresses") == addresses
    store = str(folder / "store")
    trainers = [Trainer(llama(folder, 1), server, rank, 2, store) for rank in range(2)]
    try:
        for order in ("init 2", "send wait"):
            for trainer in trainers:
                trainer.tell(order)
            assert [trainer.answer() for trainer in trainers] == [{}, {}]
        assert (answer(server), version(server)) == (tokens[1], "3")
        assert call(server, "addresses") == addresses
    finally:
        for trainer in trainers:
            trainer.close()


def test_an_instance_that_fails_halfway_serves_no_more(folder: Path) -> None:
    with begun(folder, 1) as server:
        server.serves("/health")
        call(server, "fail_halfway")
        trainer = Trainer(llama(folder, 1), server)
        try:
            trainer.well("init 0")
            failed = trainer.do("send wait")
            assert "WeightUpdateError: no instance serves version 1" in failed["error"], failed
        finally:
            trainer.close()
        with pytest.raises((httpx2.HTTPError, AssertionError)):
            answer(server)


def test_the_example_updates_a_server(folder: Path) -> None:
    trained = folder / "trained"
    with begun(folder, 1) as server:
        server.serves("/health")
        done = subprocess.run(
            [
                VLLM_PYTHON,
                str(ROOT / "examples/python/vllm_weight_update.py"),
                str(llama(folder, 0)),
                server.url,
                "--save",
                str(trained),
            ],
            env=clean_environment(**ENVIRONMENT),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [each["version"] for each in told] == [0, 1, 2]
        assert version(server) == "2"
        assert greedy(trained) == answer(server) == told[-1]["tokens"]


def test_the_plugin_registers_once() -> None:
    program = (
        "from kvxfer.connectors.vllm.weight_transfer.plugin import register\n"
        "from vllm.distributed.weight_transfer import factory\n"
        "register(); register()\n"
        "for each in (factory.WeightTransferEngineFactory, factory.WeightTransferTrainerFactory):\n"
        "    print(each._registry['kvxfer']().__name__)\n"
    )
    done = subprocess.run([VLLM_PYTHON, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == [
        "KvxferWeightTransferEngine",
        "KvxferTrainerWeightTransferEngine",
    ]
