"""Dispatch and combine of one rank of a group."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Literal, Self, Unpack, get_args

import numpy as np
import numpy.typing as npt

from kvxfer.clock import SYSTEM_CLOCK, Clock
from kvxfer.engine.native import native, translated
from kvxfer.engine.options import DEFAULT_PEER_TIMEOUT, EngineOptions
from kvxfer.engine.synchronous import SynchronousEngine
from kvxfer.errors import DeadlineExceeded, EngineClosed, InvalidArgument
from kvxfer.moe.agreement import Agreement
from kvxfer.moe.placement import Placement
from kvxfer.moe.results import Combined, Dispatched, Layout
from kvxfer.moe.shape import ITEM_BYTES, DType, MoeShape
from kvxfer.moe.tensors import (
    Room,
    Tensor,
    address_of,
    choices,
    memory_at,
    tensor_in,
)

logger = logging.getLogger("kvxfer.moe")

_TURN_SECONDS: Final = 0.5
"""Seconds in native code between two checks of the clock and of Ctrl-C."""
_LOSS_TIMEOUTS: Final = 3.0
"""The longest wait for a silent peer, in peer_timeouts of the engine. After it, a newcomer takes
the process in its place for alive."""
_LAYOUTS: Final = frozenset(get_args(Layout))
_NATIVE: Final[dict[DType, str]] = {
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "f8_e4m3",
}
_Wait = Callable[[int, float], Literal["done", "left out", "events", "deadline"]]


@dataclass(slots=True)
class _Slot:
    """A step that is under way, and the memory of the last one in this slot."""

    x: Room
    x_by_token: Room
    scales: Room
    local_ids: Room
    weights: Room
    out: Room
    step: int = -1
    ids: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """The experts of the tokens, [tokens, top_k]."""
    table: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The table of the view in which the step is run."""
    rows: tuple[int, ...] = ()
    """The shape of what combine_send() takes; empty if that is not the next call."""


class AllToAll:
    """One rank of a group that dispatches tokens to experts and combines what these return. A
    context manager: leaving it closes the group.

    shape, ranks: equal at all ranks. rank: this one, from 0. placement: the experts of each rank;
    evenly, each expert once, by default. cluster_key: as of Engine.

    One of these makes the ranks meet:
    exchange: a function that returns what all ranks have passed to it, in the order of ranks, as
    all_gather_object() does. addresses: those of all ranks, `kvx://HOST:PORT/` and 32 zeros, where
    each listens with its `host` and `port`. member: the address of any rank of a running group;
    this process joins as a newcomer, in the place of a lost rank.

    min_ranks: with fewer, the group ends with MoeGroupLost. timeout: seconds that any call waits
    for other ranks. busy_wait: seconds that a call polls before it sleeps. torch: whether the group
    gives out torch tensors, or else numpy arrays; by default, whether torch has been imported.
    options: see EngineOptions.

    All ranks call the same steps in the same order, each from one thread at a time. A call raises
    InvalidArgument if it is out of order, which changes nothing, DeadlineExceeded with the ranks
    that it waits for, StepRefused if another rank could not begin the step, RankExcluded if the
    others continue without this rank, MoeGroupLost, and EngineClosed after close(). After the last
    three, the group can no longer be used.
    """

    def __init__(
        self,
        shape: MoeShape,
        *,
        rank: int,
        ranks: int,
        cluster_key: bytes | str,
        exchange: Callable[[str], Sequence[str]] | None = None,
        addresses: Sequence[str] | None = None,
        member: str | None = None,
        placement: Placement | None = None,
        min_ranks: int = 1,
        timeout: float = 30.0,
        busy_wait: float = 50e-6,
        torch: bool | None = None,
        clock: Clock = SYSTEM_CLOCK,
        **options: Unpack[EngineOptions],
    ) -> None:
        if [exchange, addresses, member].count(None) != 2:
            raise InvalidArgument("name one of exchange, addresses and member")
        placement = placement or Placement.even(shape.experts, ranks)
        _require_placement(shape, placement, rank, ranks)
        self.shape, self.placement, self.rank, self.timeout = shape, placement, rank, timeout
        self._clock = clock
        self._torch = "torch" in sys.modules if torch is None else torch
        self._closed = False
        loss_seconds = _LOSS_TIMEOUTS * options.get("peer_timeout", DEFAULT_PEER_TIMEOUT)
        options.setdefault("name", f"rank {rank}")
        self._engine = SynchronousEngine(cluster_key=cluster_key, **options)
        try:
            self._exchange = self._native_exchange(ranks, busy_wait)
            self._engine.completions = self._exchange.events
            self._agreement = Agreement(
                self._engine,
                self._exchange,
                shape,
                placement,
                rank,
                min_ranks=min_ranks,
                loss_seconds=loss_seconds,
                clock=clock,
            )
        except BaseException:
            self._engine.close()
            raise
        self._slots = [
            _Slot(
                x=Room(shape.wire, torch=self._torch),
                x_by_token=Room(
                    shape.wire,
                    self._answers(slot) if shape.wire == shape.combine else None,
                    torch=self._torch,
                ),
                scales=Room("float32", torch=self._torch),
                local_ids=Room("int32", torch=self._torch),
                weights=Room("float32", torch=self._torch),
                out=Room(shape.output, torch=self._torch),
            )
            for slot in range(shape.slots)
        ]
        try:
            self._meet(exchange, addresses, member)
        except BaseException:
            self._leave()
            raise
        parts = ", ".join(f"{part} {size >> 20} MiB" for part, size in self.memory.items())
        logger.info("rank %d of %d: memory of at most %s", rank, ranks, parts)

    def _native_exchange(self, ranks: int, busy_wait: float) -> native.MoeExchange:
        shape = self.shape
        with translated():
            return native.MoeExchange(
                self._engine.native,
                ranks=ranks,
                rank=self.rank,
                experts=shape.experts,
                local_experts=[len(experts) for experts in self.placement.ranks],
                top_k=shape.top_k,
                hidden=shape.hidden,
                max_tokens=shape.max_tokens,
                slots=shape.slots,
                input_dtype=_NATIVE[shape.input],
                wire_dtype=_NATIVE[shape.wire],
                combine_dtype=_NATIVE[shape.combine],
                output_dtype=_NATIVE[shape.output],
                scale_block=shape.scale_block,
                spin=busy_wait,
                timeout=self.timeout,
            )

    def _meet(
        self,
        exchange: Callable[[str], Sequence[str]] | None,
        addresses: Sequence[str] | None,
        member: str | None,
    ) -> None:
        deadline = self._clock.monotonic() + self.timeout
        if member is not None:
            self._agreement.join(member, deadline)
            return
        found = addresses if exchange is None else exchange(self._engine.address)
        if found is None or len(found) != len(self.placement.ranks):
            raise InvalidArgument(
                f"the addresses of {len(self.placement.ranks)} ranks are needed, not of "
                f"{len(found or ())}"
            )
        self._agreement.form(found, deadline)

    def __enter__(self) -> Self:
        self._require_open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._leave()

    def close(self) -> None:
        """Leaves the group, once the other ranks have taken what they need from this one, or after
        `timeout` seconds. Idempotent."""
        if not self._closed and not self._engine._is_parents:
            self._agreement.take_leave(self._clock.monotonic() + self.timeout)
            self._leave()

    def _leave(self) -> None:
        self._closed = True
        self._slots = []
        self._agreement.close()
        self._engine.close()

    @property
    def address(self) -> str:
        """The address to give to newcomers, as `member`."""
        return self._engine.address

    @property
    def view(self) -> int:
        """The number of the view: equal at all members, and greater after each change of the
        members and each refused step. It does not rise by one; differences mean nothing."""
        return self._agreement.view.number

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the view."""
        return self._agreement.view.members

    @property
    def next_step(self) -> int:
        """The step that the next dispatch_send() begins."""
        return self._exchange.next_step

    @property
    def memory(self) -> dict[str, int]:
        """The most bytes of each part. Results of dispatch_recv() and combine_recv() come on top,
        as large as those of the largest step so far."""
        return dict(self._exchange.memory_parts())

    def input(self, slot: int = 0) -> Tensor:
        """Returns [max_tokens, hidden] of the input's dtype: what is dispatched from its first rows
        is not copied, if the wire has the same dtype. It may be written from the slot's
        combine_recv() until its dispatch_send(), and not after close()."""
        self._slot(slot)
        with translated():
            address = self._exchange.input(slot)
        shape = (self.shape.max_tokens, self.shape.hidden)
        memory = memory_at(address, math.prod(shape) * ITEM_BYTES[self.shape.input])
        return tensor_in(memory, self.shape.input, shape, torch=self._torch)

    def answers(self, slot: int = 0) -> Tensor:
        """Returns [ranks * max_tokens, hidden] of the combine's dtype: what is sent back from its
        first rows with layout "tokens" is not copied. With that layout, dispatch_recv() gives x
        here if the wire has the same dtype. It may be written from dispatch_recv() until
        combine_send(), and not after close(). Raises InvalidArgument if a row is not a multiple of
        64 bytes."""
        self._slot(slot)
        shape, memory = self.shape, self._answers(slot)
        if memory is None:
            raise InvalidArgument(
                f"rows of {shape.hidden} {shape.combine} are no multiple of 64 bytes"
            )
        rows = len(self.placement.ranks) * shape.max_tokens
        return tensor_in(memory, shape.combine, (rows, shape.hidden), torch=self._torch)

    def _answers(self, slot: int) -> npt.NDArray[np.uint8] | None:
        with translated():
            address = self._exchange.answers(slot)
        rows = len(self.placement.ranks) * self.shape.max_tokens
        row_bytes = self.shape.hidden * ITEM_BYTES[self.shape.combine]
        return memory_at(address, rows * row_bytes) if address else None

    # --- a step

    def dispatch_send(
        self, x: Any, ids: Any, weights: Any, *, slot: int = 0, scales: Any = None
    ) -> int:
        """Begins a step: sends each token to the ranks of its experts. Returns the step's number.

        x: [tokens, hidden] of the input's dtype, at most `max_tokens` rows. ids: [tokens, top_k]
        integers: logical experts; -1 goes nowhere, as does an expert without a live replica. The
        weights of one that a token chooses several times are added. weights: [tokens, top_k]
        floats. scales: [tokens, scales of a row] float32, if the input is float8_e4m3fn with
        scales. x and scales are contiguous. All are of torch on the CPU or of numpy, and may change
        once this returns.

        If the members have changed, all ranks agree on the next view first. If an argument is
        wrong, no rank runs the step: this call raises InvalidArgument once all ranks know, and
        their dispatch_recv() raises StepRefused. The next call begins the next step.
        """
        of_slot = self._slot(slot)
        deadline = self._clock.monotonic() + self.timeout
        self._agreement.boundary(deadline)
        try:
            of_slot.step, of_slot.ids = self._send(slot, x, ids, weights, scales)
        except InvalidArgument as error:
            with translated():
                self._exchange.check_free(slot)  # a call out of order refuses no step
            self._agreement.refuse(error, deadline)
            raise
        self._agreement.steps.add(of_slot.step)
        of_slot.rows = ()
        return of_slot.step

    def _send(
        self, slot: int, x: Any, ids: Any, weights: Any, scales: Any
    ) -> tuple[int, npt.NDArray[np.int64]]:
        """Sends the tokens; returns the step, and the choices in it."""
        shape = self.shape
        try:
            count = len(x)
        except TypeError:  # also of a scalar
            raise InvalidArgument(f"x is a {type(x).__name__} that has no rows") from None
        chosen = choices(ids, "ids", np.int64, (count, shape.top_k))
        shares = choices(weights, "weights", np.float32, (count, shape.top_k))
        address = address_of(x, "x", shape.input, (count, shape.hidden))
        of_scales = 0
        if shape.scales and shape.input == shape.wire:
            of_scales = address_of(scales, "scales", "float32", (count, shape.scales))
        elif scales is not None:
            raise InvalidArgument("scales are for an input of float8_e4m3fn with a scale_block")
        with translated():
            step = self._exchange.dispatch_send(slot, address, of_scales, chosen, shares)
        return step, chosen.copy()

    def dispatch_recv(
        self,
        *,
        slot: int = 0,
        layout: Layout = "experts",
        align: int = 1,
        capacity: int | None = None,
    ) -> Dispatched:
        """Waits for all tokens of the slot's step that are for this rank's experts. Raises
        StepRefused, which ends the step, if another rank could not begin it.

        layout: see Dispatched. align: with "experts", each expert's rows begin at a multiple of it.
        capacity: with "padded", the rows of each expert; by default the most that can arrive. If an
        expert has more, this raises InvalidArgument, and may be called again.
        """
        of_slot = self._slot(slot)
        if layout not in _LAYOUTS or align < 1:
            raise InvalidArgument(
                f"layout is {layout!r} with align {align}; choose from experts, padded, tokens, "
                "and an align of at least 1"
            )
        self._wait(self._exchange.dispatch_wait, slot, "tokens", agreed=True)
        shape, by_source = self.shape, layout == "tokens"
        if layout == "padded" and capacity is None:
            capacity = len(self.placement.ranks) * shape.max_tokens
        with translated():
            expert_rows, source_rows, begins, count = self._exchange.arrival(
                slot, by_source, align, capacity if layout == "padded" else None
            )
        rows = (len(expert_rows), capacity) if layout == "padded" else (count,)
        room = of_slot.x_by_token if by_source else of_slot.x
        x, at_x = room.tensor((*rows, shape.hidden))
        scales, local_ids, weights = None, None, None
        at_scales = at_ids = at_weights = 0
        if shape.scales:
            scales, at_scales = of_slot.scales.tensor((*rows, shape.scales))
        if by_source:
            local_ids, at_ids = of_slot.local_ids.tensor((*rows, shape.top_k))
            weights, at_weights = of_slot.weights.tensor((*rows, shape.top_k))
        with translated():
            missing = self._exchange.place(
                slot, by_source, begins, at_x, at_scales, at_ids, at_weights
            )
        of_slot.rows = (*rows, shape.hidden)
        run = self._agreement.run(of_slot.step)
        of_slot.table = run.table
        return Dispatched(
            of_slot.step,
            run.members,
            layout,
            x,
            scales,
            expert_rows,
            begins,
            source_rows,
            local_ids,
            weights,
            missing,
            shape.scale_block,
        )

    def combine_send(self, y: Any, *, slot: int = 0) -> None:
        """Sends back what the experts made of the slot's tokens.

        y: of the combine's dtype and the shape of Dispatched.x, each row in the place of that of x.
        With layout "tokens", a row is the weighted sum of the token's local experts; with the
        others, the output of one expert, which the group weights. y may change once this returns;
        rows in answers() only after combine_recv().
        """
        of_slot = self._slot(slot)
        if not of_slot.rows:
            with translated():
                self._exchange.check_placed(slot)
        address = address_of(y, "y", self.shape.combine, of_slot.rows)
        with translated():
            self._exchange.combine_send(slot, address)
        of_slot.rows = ()

    def combine_recv(self, *, slot: int = 0, out: Any = None) -> Combined:
        """Waits for the contributions of all ranks to this rank's tokens, adds them, and ends the
        step. The contribution of a lost rank is whole or absent.

        out: takes the sums, [tokens, hidden] of the output's dtype; see Combined.
        """
        of_slot, shape = self._slot(slot), self.shape
        wanted = (len(of_slot.ids), shape.hidden)
        self._wait(self._exchange.combine_wait, slot, "contributions", agreed=False)
        if out is None:
            out, address = of_slot.out.tensor(wanted)
        else:
            address = address_of(out, "out", shape.output, wanted)
        with translated():
            missing = self._exchange.combine(slot, address)
        self._agreement.step_ended(of_slot.step)
        return Combined(of_slot.step, out, missing, of_slot.ids, of_slot.table)

    def _slot(self, slot: int) -> _Slot:
        if isinstance(slot, int) and 0 <= slot < len(self._slots):
            return self._slots[slot]
        self._require_open()
        raise InvalidArgument(f"slot is {slot!r}; the group has {len(self._slots)}, from 0 on")

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosed(f"the group of rank {self.rank} was closed; make a new one")

    def _wait(self, wait: _Wait, slot: int, what: str, *, agreed: bool) -> None:
        """Waits in a step. agreed: completes an agreement on a view first, as that may run the step
        again."""
        deadline = self._clock.monotonic() + self.timeout
        while True:
            if agreed:
                self._agreement.settle(deadline)
            left = max(0.0, deadline - self._clock.monotonic())
            with translated():
                waited = wait(slot, min(_TURN_SECONDS, left))
            if waited == "done" and not self._agreement.doubt(deadline):
                return
            if waited == "left out":
                raise self._agreement.refusal(self._slots[slot].step)
            if waited == "events":
                self._agreement.attend()
            elif not left:
                ranks = self._exchange.awaited(slot)
                raise DeadlineExceeded(
                    f"no {what} of ranks {ranks} within {self.timeout:g} s, in step "
                    f"{self._slots[slot].step}; they are alive: do they run the same steps?"
                )


def _require_placement(shape: MoeShape, placement: Placement, rank: int, ranks: int) -> None:
    if not 0 <= rank < ranks:
        raise InvalidArgument(f"rank is {rank} of {ranks} ranks")
    if len(placement.ranks) != ranks or placement.experts != shape.experts:
        raise InvalidArgument(
            f"the placement has {placement.experts} experts on {len(placement.ranks)} ranks, but "
            f"the group {shape.experts} on {ranks}"
        )
