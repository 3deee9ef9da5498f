"""One rank of a round: runs steps until it is told to stop, and checks all data that it receives.

Values, weights and the outputs of experts are small integers, so sums in float32 are exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvxfer.clock import SYSTEM_CLOCK
from kvxfer.engine.options import EngineOptions
from kvxfer.errors import KvxferError, MoeGroupLost, RankExcluded
from kvxfer.moe.all_to_all import AllToAll
from kvxfer.moe.placement import Placement
from kvxfer.moe.shape import MoeShape
from verify.chaos.link import Host

from .breakage import Breakage, Fault

KEY: Final = "chaos of MoE groups, 32 bytes ..."
TIMEOUT: Final = 25.0
"""The limit in seconds; a call that takes longer hangs."""
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Setting:
    """The configuration of a round's group."""

    ranks: int
    fabric: Literal["local", "tcp", "hosts"]
    layout: Literal["experts", "tokens"]
    overlap: bool
    copies: int
    seed: int
    hosts: tuple[Host, ...] = ()
    """The hosts, for fabric "hosts". The first has the first half of the ranks."""

    def host(self, rank: int) -> Host | None:
        return self.hosts[2 * rank // self.ranks] if self.hosts else None

    @property
    def shape(self) -> MoeShape:
        return MoeShape(experts=2 * self.ranks, hidden=96, top_k=2, max_tokens=16, input="float32")

    @property
    def placement(self) -> Placement:
        return Placement.even(2 * self.ranks, self.ranks, self.copies)

    def batch(self, step: int, rank: int) -> tuple[Array, Array, Array]:
        """Returns rows, choices and weights of a rank in a step."""
        rng = np.random.default_rng((self.seed, step, rank))
        count = int(rng.integers(0, self.shape.max_tokens + 1))
        x = rng.integers(-8, 9, (count, self.shape.hidden)).astype(np.float32)
        ids = rng.permuted(np.tile(np.arange(self.shape.experts), (count, 1)), axis=1)[:, :2]
        weights = rng.integers(1, 5, (count, 2)).astype(np.float32)
        return x, np.ascontiguousarray(ids, np.int64), weights

    def table(self, members: tuple[int, ...], rank: int) -> Array:
        """Returns the place to which a rank sends each expert's tokens. Over tcp no other rank
        counts as near."""
        near = {each for each in members if self.host(each) is self.host(rank)} - {rank}
        near = set() if self.fabric == "tcp" else near
        alive = [each in members for each in range(self.ranks)]
        return self.placement.table(alive, rank, near)


def expert(number: Any, values: Array) -> Array:
    """Returns the output of a logical expert for these rows."""
    made: Array = values * (number % 5 - 2) + number % 7
    return made


class Wrong(Exception):
    """A promise was broken."""


class Shared:
    """The state that the processes of a round share: when the victims broke, whether others may
    still break, the current step, whether to stop, and the step to stop at."""

    def __init__(self, context: Any, ranks: int) -> None:
        self.broke_at = context.RawArray("d", ranks)
        self.armed = context.RawValue("q", 1)
        self.steps = context.RawValue("q", 0)
        self.asked = context.RawValue("q", 0)
        self.stop = context.RawValue("q", -1)


class Member:
    """A rank. It reports to its driver: its address, views, missing ranks with their times, and its
    end."""

    def __init__(
        self,
        setting: Setting,
        rank: int,
        fault: Fault | None,
        victims: frozenset[int],
        shared: Shared,
        driver: Connection,
    ) -> None:
        self._setting, self.rank, self._driver, self._shared = setting, rank, driver, shared
        self._leads = rank == min({*range(setting.ranks)} - victims, default=0)
        self._breakage = Breakage(fault, lambda: bool(shared.armed.value), self._broke)
        self._random = random.Random(setting.seed * 64 + rank)
        self._named: set[int] = set()
        self._without: set[int] = set()
        self._members: tuple[int, ...] = ()
        self._tables: dict[int, Array] = {}
        self._sent: dict[int, tuple[Array, Array, Array]] = {}

    def run(self, member: str | None) -> None:
        setting = self._setting
        ended, why = "", ""
        options = EngineOptions(fabrics=["tcp"] if setting.fabric == "tcp" else ["local", "tcp"])
        if host := setting.host(self.rank):
            host.enter()
            options["host"] = host.address
        try:
            with AllToAll(
                setting.shape,
                rank=self.rank,
                ranks=setting.ranks,
                cluster_key=KEY,
                exchange=None if member else self._exchange,
                member=member,
                placement=setting.placement,
                timeout=TIMEOUT,
                torch=False,
                **options,
            ) as self._group:
                agreement = self._group._agreement
                self._breakage.watch(agreement._mesh, agreement)
                self._steps()
        except (RankExcluded, MoeGroupLost) as error:
            ended, why = error.code, str(error)
        except (KvxferError, Wrong) as error:
            ended, why = "wrong", f"{type(error).__name__}: {error}"
        self._driver.send(("ended", ended, why))

    def _exchange(self, address: str) -> list[str]:
        self._driver.send(("address", address, ""))
        addresses: list[str] = self._driver.recv()
        return addresses

    def _broke(self, at: float) -> None:
        self._shared.broke_at[self.rank] = at

    def _steps(self) -> None:
        step = self._group.next_step
        while not self._over(step):
            if self._setting.overlap and step % 2 == 0:  # a newcomer may begin at an odd step
                for act in (self._dispatch, self._compute, self._combine):
                    act(step, 0)
                    act(step + 1, 1)
                step += 2
            else:
                for act in (self._dispatch, self._compute, self._combine):
                    act(step, step % 2)
                step += 1

    def _over(self, step: int) -> bool:
        """Returns whether the rank stops before this step. The leading rank decides the step to
        stop at. No other rank has passed it, as each step needs all ranks."""
        shared = self._shared
        if self._leads:
            shared.steps.value = step
        if self._leads and shared.asked.value and shared.stop.value < 0:
            shared.stop.value = step + 4
        return bool(0 <= shared.stop.value <= step)

    # --- a step

    def _dispatch(self, step: int, slot: int) -> None:
        if self._random.random() < 0.2:  # no sleep: another process would use the core meanwhile
            sum(range(self._random.randrange(100_000)))
        batch = self._sent[step] = self._setting.batch(step, self.rank)
        self._breakage.at("dispatch_send", step)
        found = self._group.dispatch_send(*batch, slot=slot)
        self._require(found == step, f"step {found} began, not {step}")
        if self._group.members != self._members:
            self._members = self._group.members
            self._driver.send(("members", self._members, self._group.address))
            gone = {*range(self._setting.ranks)} - {*self._members}
            self._name(gone)
            for rank in gone - self._without:
                self._tell("without", rank)
            self._without = gone

    def _compute(self, step: int, slot: int) -> None:
        self._breakage.at("dispatch_recv", step)
        got = self._group.dispatch_recv(slot=slot, layout=self._setting.layout)
        self._breakage.at("compute", step)
        self._require(got.step == step, f"tokens of step {got.step} arrived, not of {step}")
        self._missing(got.missing)
        self._tables[step] = self._setting.table(got.members, self.rank)
        y = self._answers(got)
        self._breakage.at("combine_send", step)
        self._group.combine_send(y, slot=slot)

    def _answers(self, got: Any) -> Array:
        """Returns the experts' outputs for the rows. The rows must equal their sources' rows."""
        setting, step = self._setting, got.step
        y = np.zeros_like(got.x)
        row_of = dict(enumerate(np.asarray(got.begins).tolist()))
        for source in got.members:
            x, ids, weights = setting.batch(step, source)
            table = setting.table(got.members, source)
            if source in got.missing and not got.source_rows[source]:
                continue
            for token, chosen in enumerate(ids.tolist()):
                mine = [
                    (choice, number)
                    for choice, number in enumerate(chosen)
                    if table[number] >> 32 == self.rank
                ]
                for at, (choice, number) in enumerate(mine):
                    by_token = got.layout == "tokens"
                    place = source if by_token else int(table[number]) & 0xFFFFFFFF
                    row = row_of[place]
                    if not by_token or at + 1 == len(mine):
                        row_of[place] += 1
                    values = got.x[row]
                    zeros = source in got.missing and not values.any()
                    self._require(
                        zeros or np.array_equal(values, x[token]),
                        f"step {step}: row {row} is not token {token} of rank {source}",
                    )
                    made = expert(number, values)
                    y[row] += weights[token, choice] * made if by_token else made
        return y

    def _combine(self, step: int, slot: int) -> None:
        x, ids, weights = self._sent.pop(step)
        self._breakage.at("combine_recv", step)
        combined = self._group.combine_recv(slot=slot)
        self._require(combined.step == step, f"step {combined.step} ended, not {step}")
        self._missing(combined.missing)
        owners = self._tables.pop(step)[ids] >> 32
        contributed = (owners >= 0) & ~np.isin(owners, combined.missing)
        self._require(
            np.array_equal(combined.contributed, contributed),
            f"step {step}: contributed is {combined.contributed.tolist()} with owners "
            f"{owners.tolist()} and missing {combined.missing}",
        )
        total = np.zeros_like(x)
        for choice in range(ids.shape[1]):
            shares = (weights[:, choice] * contributed[:, choice])[:, None]
            total += shares * expert(ids[:, choice, None], x)
        self._require(
            np.array_equal(combined.out, total.astype(np.float32)),
            f"step {step}: the sums are wrong, with missing {combined.missing}",
        )

    # --- missing ranks

    def _missing(self, ranks: tuple[int, ...]) -> None:
        if ranks:
            self._name({*ranks})

    def _name(self, ranks: set[int]) -> None:
        for rank in ranks - self._named:
            self._named.add(rank)
            # A frozen rank that wakes up may first see the end of a rank that has excluded it.
            broke = any(self._shared.broke_at[each] > 0 for each in (rank, self.rank))
            why = self._group._exchange.why_lost(rank)
            self._require(broke, f"rank {rank} is missing, and did not break: {why}")
            if self._shared.broke_at[rank] > 0:
                self._tell("named", rank)

    def _tell(self, what: str, rank: int) -> None:
        """Reports an event with the seconds since the rank broke."""
        seconds = SYSTEM_CLOCK.monotonic() - self._shared.broke_at[rank]
        self._driver.send((what, rank, seconds))

    def _require(self, holds: bool, text: str) -> None:
        if not holds:
            raise Wrong(f"rank {self.rank}: {text}")
