"""vLLM's control path of weight updates over workers that fail, and its settings."""

from __future__ import annotations

import os
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.vllm.weight_transfer.control_path import PIN, ControlPath
from kvxfer.connectors.vllm.weight_transfer.member import MemberSettings
from kvxfer.errors import InvalidArgument, NotStaged

KEY = "k" * 32


class Worker:
    """The behaviour of vLLM's worker, and of kvxfer's engine in it, in an update."""

    def __init__(self) -> None:
        self.active = False
        self.staged = ""
        self.pinned = ""
        self.given_up = False
        self.serves = ""
        self.answers: deque[Exception | None] = deque()

    def start(self) -> None:
        self.active, self.pinned, self.given_up = True, "", False

    def update(self, action: str, update_id: str = "") -> None:
        assert self.active
        if action == PIN and update_id != self.staged:
            raise NotStaged(update_id)
        self.pinned, self.given_up = update_id if action == PIN else "", action != PIN

    def finish(self) -> None:
        assert self.active
        assert self.pinned or self.given_up
        self.serves, self.pinned, self.active = self.pinned or self.serves, "", False


class Instance:
    """An instance whose workers all take each call, and agree on how it ended. As in vLLM, their
    answers are read up to the first error. It fails before its `dies_at`-th call, as if the trainer
    had ended."""

    def __init__(self, workers: int) -> None:
        self.workers = [Worker() for _ in range(workers)]
        self.dies_at = -1
        self.said = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Does nothing, as it is not a step of an update."""

    def start_weight_update(self) -> None:
        self._all("start")

    def update_weights(self, update_info: Any) -> None:
        self._all("update", **update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish")
        self.said = weight_version or self.said

    def _all(self, call: str, **arguments: str) -> None:
        if self.dies_at == 0:
            raise ConnectionError("the trainer is gone")
        self.dies_at -= 1
        failed: NotStaged | None = None
        for worker in self.workers:
            try:
                getattr(worker, call)(**arguments)
            except NotStaged as error:
                failed = error
        for worker in self.workers:
            worker.pinned = "" if failed else worker.pinned
            worker.answers.append(None)
        if failed is not None:
            self.workers[-1].answers[-1] = failed
            self.workers[-1].active = False
        for worker in self.workers:
            answer = worker.answers.popleft()
            if answer is not None:
                raise answer
        assert not any(worker.answers for worker in self.workers)


def update(instance: Instance, version: int, staged: list[bool]) -> bool:
    """Updates as the coordinator does; True if the update was committed."""
    update_id = f"u{version}"
    for worker, has in zip(instance.workers, staged, strict=True):
        worker.staged = update_id if has else "another"
    path = ControlPath(instance)
    try:
        path.pin(update_id, version)
    except NotStaged:
        path.unpin(update_id)
        return False
    path.commit(update_id, version)
    return True


def test_all_workers_apply_or_none_and_each_update_gets_through() -> None:
    seed = int(os.environ["KVXFER_TEST_SEED"])
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        instance = Instance(rng.randint(1, 4))
        serves = ""
        for version in range(1, 8):
            staged = [rng.random() < 0.7 for _ in instance.workers]
            instance.dies_at = rng.choice([-1, -1, rng.randrange(6)])
            try:
                committed = update(instance, version, staged)
            except ConnectionError:
                # The trainer does not know how far the update got; a commit is one call to all
                # workers.
                committed = instance.workers[0].serves == f"u{version}"
            else:
                assert committed == all(staged)
            instance.dies_at = -1
            serves = f"u{version}" if committed else serves
            assert {worker.serves for worker in instance.workers} == {serves}
        assert update(instance, 8, [True] * len(instance.workers))
        assert {worker.serves for worker in instance.workers} == {"u8"}
        assert instance.said == "8"


def config(own: Any = None, connector: Any = None) -> SimpleNamespace:
    kv = connector and SimpleNamespace(
        kv_connector="KvxferConnector", kv_connector_extra_config=connector
    )
    return SimpleNamespace(additional_config=own and {"kvxfer": own}, kv_transfer_config=kv)


def test_settings_override_those_of_the_connector(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    assert MemberSettings.read(config()).options == {"host": "127.0.0.1"}
    assert MemberSettings.read(config(), "10.0.0.7").options["host"] == "10.0.0.7"
    file = tmp_path / "key"
    file.write_text("x" * 32)
    connector = {"host": "10.0.0.8", "cluster_key_file": str(file), "lease_seconds": 3}
    read = MemberSettings.read(config({"fabrics": ["tcp"], "host": "10.0.0.9"}, connector))
    assert read.options == {"host": "10.0.0.9", "fabrics": ["tcp"]}
    assert read.cluster_key == b"x" * 32
    assert KEY not in repr(read)


def test_an_unknown_setting_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVXFER_CLUSTER_KEY", KEY)
    with pytest.raises(InvalidArgument, match=r"additional_config\.kvxfer\.hosts"):
        MemberSettings.read(config({"hosts": "10.0.0.9"}))
    with pytest.raises(InvalidArgument, match=r"additional_config\.kvxfer\.host"):
        MemberSettings.read(config({"host": 7}))
