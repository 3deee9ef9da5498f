"""A rank of a scenario: runs its steps, and compares all that it gets with the reference."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, Final

import torch

from kvxfer.errors import InvalidArgument, KvxferError, StepRefused
from kvxfer.moe.all_to_all import AllToAll
from kvxfer.moe.results import Combined, Dispatched
from tests.moe.scenario import FP8, Batch, Phase, Scenario, as_double, expected, expert

KEY: Final = "k" * 32
PATIENCE: Final = 60.0


class Stop:
    """Stops ranks that have no number of steps at the same step: the driver sets `asked`, and the
    leading rank then sets `step`. No other rank is past `step` by then, as a step needs all."""

    def __init__(self, asked: Any, step: Any) -> None:
        self.asked, self.step = asked, step

    def look(self, step: int, *, leads: bool) -> bool:
        """True if this step is not run any more."""
        if leads and self.asked.value and self.step.value < 0:
            self.step.value = step + 4
        return 0 <= self.step.value <= step


class GroupRank:
    """A rank that reports to its driver its address, each view, and how it ended."""

    def __init__(self, scenario: Scenario, rank: int, driver: Connection, stop: Stop) -> None:
        self.scenario, self.rank, self.driver, self.stop = scenario, rank, driver, stop
        self._random = random.Random(scenario.seed * 64 + rank)
        self._sent: dict[int, Batch] = {}
        self._owners: dict[int, torch.Tensor] = {}  # by step: the owner of each choice, or -1
        self._leads = rank == (1 if scenario.victim == 0 else 0)
        self._view = -1

    def run(self, member: str | None = None) -> None:
        scenario = self.scenario
        torch.set_num_threads(1)
        try:
            with AllToAll(
                scenario.shape,
                rank=self.rank,
                ranks=scenario.ranks,
                cluster_key=KEY,
                exchange=None if member else self._exchange,
                member=member,
                placement=scenario.placement,
                min_ranks=scenario.min_ranks,
                timeout=PATIENCE,
                torch=not scenario.numpy,
                fabrics=[scenario.fabric] if scenario.fabric == "tcp" else ["local", "tcp"],
            ) as self.group:
                self._steps()
        except KvxferError as error:
            if error.code not in ("rank-excluded", "moe-group-lost"):
                raise
            self.driver.send(("ended", error.code, str(error)))
        else:
            self.driver.send(("ended", "", ""))

    def _exchange(self, address: str) -> list[str]:
        self.driver.send(("address", address, ""))
        addresses: list[str] = self.driver.recv()
        return addresses

    def _steps(self) -> None:
        step = self.group.next_step
        while not self._over(step):
            if self.scenario.overlap and step % 2 == 0:  # a newcomer may begin with an odd step
                self._dispatch(step, slot=0)
                self._dispatch(step + 1, slot=1)
                self._compute(step, slot=0)
                self._compute(step + 1, slot=1)
                self._combine(step, slot=0)
                self._combine(step + 1, slot=1)
                step += 2
            else:
                self._dispatch(step, slot=step % 2)
                self._compute(step, slot=step % 2)
                self._combine(step, slot=step % 2)
                step += 1

    def _over(self, step: int) -> bool:
        if self.scenario.steps:
            return step >= self.scenario.steps
        return self.stop.look(step, leads=self._leads)

    def _at(self, phase: Phase, step: int) -> None:
        """Kills or freezes the victim at its phase; other ranks may pause."""
        scenario = self.scenario
        if (self.rank, step, phase) == (scenario.victim, scenario.fault_step, scenario.phase):
            fault = signal.SIGKILL if scenario.fault == "kill" else signal.SIGSTOP
            os.kill(os.getpid(), fault)
        if scenario.pauses and self._random.random() < 0.2:
            sum(range(self._random.randrange(200_000)))  # not idle: it keeps the core busy

    def _dispatch(self, step: int, slot: int) -> None:
        self._at("before dispatch", step)
        scenario, batch = self.scenario, self.scenario.batch(step, self.rank)
        self._sent[step] = batch
        tensors: Callable[[torch.Tensor], Any] = _to_numpy if scenario.numpy else lambda each: each
        x = tensors(batch.x)
        if scenario.own_memory:
            own = self.group.input(slot)[: len(batch.x)]
            own[:] = x
            x = own
        refuses = scenario.refuses(step, self.rank)
        try:
            found = self.group.dispatch_send(
                x,
                tensors(batch.ids),
                tensors(batch.weights[:, :0] if refuses else batch.weights),
                slot=slot,
                scales=None if batch.scales is None else tensors(batch.scales),
            )
            assert found == step
            assert not refuses
        except InvalidArgument:
            if not refuses:
                raise
            del self._sent[step]
            assert self.group.next_step == step + 1
        if self.group.view != self._view:
            self._view = self.group.view
            self.driver.send(("view", self.group.members, self.group.address))
        self._at("after dispatch", step)

    def _compute(self, step: int, slot: int) -> None:
        scenario = self.scenario
        if step not in self._sent:
            return
        try:
            got = self.group.dispatch_recv(slot=slot, layout=scenario.layout, align=scenario.align)
        except StepRefused as error:
            assert step in scenario.refused_steps
            assert str(error).startswith(f"rank {scenario.refuser} refused step {step}: weights is")
            del self._sent[step]
            return
        assert step not in scenario.refused_steps
        assert got.step == step
        self._at("after arrival", step)
        answers = self._check(got)
        answers = _to_numpy(answers) if scenario.numpy else answers
        if scenario.own_memory and scenario.layout == "tokens":
            own = self.group.answers(slot)[: len(answers)]
            own[:] = answers
            answers = own
        self.group.combine_send(answers, slot=slot)
        self._at("after answer", step)

    def _combine(self, step: int, slot: int) -> None:
        if step not in self._sent:
            return
        batch = self._sent.pop(step)
        combined: Combined = self.group.combine_recv(slot=slot)
        assert combined.step == step
        contributed = torch.from_numpy(combined.contributed)
        assert {*combined.missing} <= {self.scenario.victim}
        owners = self._owners.pop(step)
        absent = (owners < 0) | (owners == (combined.missing or (-1,))[0])
        assert torch.equal(contributed, ~absent)
        total, slack = expected(self.scenario, batch, contributed)
        out = _to_torch(combined.out, self.scenario.shape.output).double()
        wrong = (out - total).abs() > slack
        assert not wrong.any(), (step, wrong.nonzero()[0], out[wrong][0], total[wrong][0])

    # --- the received rows

    def _check(self, got: Dispatched) -> torch.Tensor:
        """Compares all rows with those of their sources; returns the answers of the experts."""
        scenario, shape = self.scenario, self.scenario.shape
        assert {*got.missing} <= {scenario.victim}
        members = got.members
        tables = scenario.tables([rank in members for rank in range(scenario.ranks)])
        ids = self._sent[got.step].ids
        owners = torch.tensor(tables[self.rank])[ids] >> 32
        self._owners[got.step] = owners.where(ids >= 0, -1)
        x = _to_torch(got.x, shape.wire)
        scales = None if got.scales is None else _to_torch(got.scales, "float32")
        x, scales = x.flatten(0, -2), scales if scales is None else scales.flatten(0, -2)
        answers = torch.zeros(x.shape, dtype=torch.float64)
        rows = dict.fromkeys(range(scenario.ranks), 0)
        filled = [0] * len(got.expert_rows)
        for source in members:
            batch = scenario.batch(got.step, source)
            sent, sent_scales = batch.arrived(shape)
            gone = source in got.missing and not got.source_rows[source]
            for token, ids in enumerate(batch.ids.tolist()):
                shares: dict[int, torch.Tensor] = {}  # by logical expert, in the order of choices
                for choice, number in enumerate(ids):
                    if number >= 0 and tables[source][number] >> 32 == self.rank:
                        weight = batch.weights[token, choice]
                        shares[number] = shares.get(number, torch.tensor(0.0)) + weight
                entries = [
                    (number, tables[source][number] & 0xFFFFFFFF, weight)
                    for number, weight in shares.items()
                ]
                if gone or not entries:
                    continue
                if got.layout == "tokens":
                    places = [int(got.begins[source]) + rows[source]] * len(entries)
                    self._check_entries(got, places[0], entries)
                else:
                    places = [int(got.begins[local]) + filled[local] for _, local, _ in entries]
                rows[source] += 1
                for (number, local, weight), place in zip(entries, places, strict=True):
                    filled[local] += 1
                    self._check_row(
                        x[place],
                        None if scales is None else scales[place],
                        sent[token],
                        None if sent_scales is None else sent_scales[token],
                        may_be_zero=source in got.missing,
                    )
                    values = as_double(
                        x[place, None], None if scales is None else scales[place, None], shape
                    )[0]
                    if got.layout == "tokens":
                        answers[place] += weight * expert(number, values)
                    else:
                        answers[place] = expert(number, values)
        assert got.source_rows.tolist() == list(rows.values())
        assert got.expert_rows.tolist() == filled
        return answers.to(getattr(torch, shape.combine)).view(got.x.shape)

    def _check_entries(
        self, got: Dispatched, row: int, entries: list[tuple[int, int, torch.Tensor]]
    ) -> None:
        """Checks a token's local experts and the sums of their weights, in the order of top-k."""
        ids, shares = _to_torch(got.ids, "int32")[row], _to_torch(got.weights, "float32")[row]
        found = ids[ids >= 0]
        assert found.tolist() == [local for _, local, _ in entries]
        assert torch.equal(shares[ids >= 0], torch.stack([weight for _, _, weight in entries]))

    def _check_row(
        self,
        row: torch.Tensor,
        scales: torch.Tensor | None,
        sent: torch.Tensor,
        sent_scales: torch.Tensor | None,
        *,
        may_be_zero: bool,
    ) -> None:
        shape = self.scenario.shape
        if may_be_zero and not row.double().any():
            return
        if scales is None or sent_scales is None:
            assert torch.equal(row.view(torch.uint8), sent.view(torch.uint8))
        elif shape.input == FP8:
            assert torch.equal(row.view(torch.uint8), sent.view(torch.uint8))
            assert torch.equal(scales, sent_scales)
        else:  # a division may be done as a multiplication: one unit in the last place
            assert torch.allclose(scales, sent_scales, rtol=1e-6)
            assert ((row.double() - sent.double()).abs() <= sent.double().abs() / 7 + 2**-9).all()


def _to_numpy(tensor: torch.Tensor) -> Any:
    """Returns the tensor as a group takes it: types that numpy lacks, as their bits."""
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def _to_torch(tensor: Any, dtype: str) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    return torch.from_numpy(tensor).view(getattr(torch, dtype))
