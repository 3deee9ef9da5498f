"""The reasons why no instances can take a request, found on the shelves without a look at each
instance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from kvxfer.errors import NoCapacity, NotAggregating, PromptTooLong
from kvxfer.instances import Instance, InstanceState, Role
from kvxfer.scheduler import refusals
from kvxfer.scheduler.pairing import SIDES, Kind, mismatch_of, prompt_blocks
from kvxfer.scheduler.scoring import available_blocks
from kvxfer.scheduler.shelves import Order, Shelves
from kvxfer.transfers import TransferRequest

_MISMATCHES_TOLD: Final = 3


class Refusing:
    """The refusal of one request. `kinds` are all kinds that exist, with their numbers."""

    def __init__(
        self, shelves: Shelves, kinds: Mapping[Kind, int], request: TransferRequest
    ) -> None:
        self._shelves = shelves
        self._request = request
        self._among = {number: shelves.among(kind, request) for kind, number in kinds.items()}
        self._of_model = {
            kind: number
            for kind, number in kinds.items()
            if self._among[number] is None or any(self._members(number))
        }
        self._kinds = {
            kind: number for kind, number in self._of_model.items() if kind.serves(request)
        }

    def refusal(self) -> NoCapacity | PromptTooLong | NotAggregating:
        request, registered = self._request, bool(self._of_model)
        if request.aggregated and registered:
            for kinds in (self._of_model, self._kinds):
                for kind in [kind for kind in kinds if not kind.aggregates]:
                    del kinds[kind]
            if not self._of_model:
                return refusals.not_aggregating(self._model)
        if registered and not self._kinds:
            return NoCapacity(
                f"no instance serves weights version {request.weights_version} now; retry, or ask "
                "for another one",
                reasons=[self._versions_there()],
            )
        if request.aggregated:
            return self._no_single()
        for side in SIDES:
            too_long = self._prompt_too_long([side], f"{side} instance")
            if too_long is not None:
                return too_long
        return refusals.no_pair(self._reasons())

    def _no_single(self) -> NoCapacity | PromptTooLong:
        """Returns why no instance can serve the request alone now, although some could."""
        if (too_long := self._prompt_too_long(SIDES, "instance")) is not None:
            return too_long
        if not self._kinds:
            reason = f"no instance{self._model} is registered"
        elif not self._first(SIDES, "room"):
            reason = f"no instance{self._model} is ready ({self._states(Role)})"
        else:
            reason = self._too_few_blocks(SIDES, f"instance{self._model}")
        return NoCapacity("no instance can serve the request alone now; retry", reasons=[reason])

    def _reasons(self) -> list[str]:
        of_model = self._model
        if self._request.weights_version is not None:
            of_model += f" with weights version {self._request.weights_version}"
        if not self._kinds:
            return [f"no instance{of_model} is registered"]
        reasons = []
        for side in SIDES:
            roles = [role for role in Role if role.serves(side)]
            if not self._first([side], "room"):
                others = self._states(roles)
                reasons.append(f"no {side} instance{of_model} is ready ({others})")
            elif not self._fitting(side):
                reasons.append(self._too_few_blocks([side], f"{side} instance{of_model}"))
        if reasons:
            return reasons
        mismatches = self._mismatches()
        if mismatches:
            more = len(mismatches) - _MISMATCHES_TOLD
            told = mismatches[:_MISMATCHES_TOLD]
            return [*told, f"and {more} more like this"] if more > 0 else told
        return [f"only one instance{of_model} is ready, and a transfer takes two"]

    def _prompt_too_long(self, sides: Iterable[Role], what: str) -> PromptTooLong | None:
        request, ready = self._request, self._first(sides, "size")
        if not ready or any(prompt_blocks(i, request) <= i.num_blocks for i in ready.values()):
            return None
        largest = _most(ready.values(), lambda i: i.num_blocks * i.layout.block_size)
        blocks = prompt_blocks(largest, request)
        return refusals.prompt_too_long(request, blocks, what, largest)

    def _too_few_blocks(self, sides: Sequence[Role], what: str) -> str:
        first = self._first(sides, "room")
        most = _most(first.values(), available_blocks)
        kind = next(kind for kind, instance in first.items() if instance is most)
        return (
            f"no {what} has the {self._needs(kind, sides[-1])} KV blocks free "
            f"(most: {most.instance_id!r} with {available_blocks(most)})"
        )

    def _mismatches(self) -> list[str]:
        """Returns a sentence for each two kinds that do not match, about the instances of each with
        most room."""
        ours, theirs = (self._fitting(side) for side in SIDES)
        return [
            f"prefill {prefill.instance_id!r} and decode {decode.instance_id!r} do not match: "
            f"{said}"
            for (kind, prefill), (other, decode) in product(ours.items(), theirs.items())
            if (said := mismatch_of(kind, other)) is not None
        ]

    def _fitting(self, side: Role) -> dict[Kind, Instance]:
        fit = {
            kind: instance
            for kind, instance in self._first([side], "room").items()
            if self._needs(kind, side) <= available_blocks(instance)
        }
        return dict(sorted(fit.items(), key=lambda item: item[1].instance_id))

    def _needs(self, kind: Kind, side: Role) -> int:
        number = self._kinds[kind]
        return self._shelves.needs(kind.layout, number, self._request, self._among[number])[side]

    def _first(self, sides: Iterable[Role], order: Order) -> dict[Kind, Instance]:
        """Returns each kind's ready instance with the most blocks, the first by id of equals."""
        found = {}
        for kind, number in self._kinds.items():
            keys = (self._shelves.first(number, s, order, self._among[number]) for s in sides)
            best = min((key for key in keys if key is not None), default=None)
            if best is not None:
                found[kind] = self._shelves.entries[best[1]].instance
        return found

    def _states(self, roles: Iterable[Role]) -> str:
        states = Counter[InstanceState]()
        for number in self._kinds.values():
            states += self._census(number, roles)
        told = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return told or "none registered"

    def _versions_there(self) -> str:
        told = Counter[int | None]()
        for kind, number in self._of_model.items():
            told[kind.weights_version] += self._census(number, Role).total()
        silent = told.pop(None, 0)
        there = [f"{version} ({count})" for version, count in sorted(told.items())]
        if silent:
            there.append(f"not told ({silent})")
        return (
            f"no instance{self._model} serves weights version {self._request.weights_version}; "
            f"there are {', '.join(there)}"
        )

    def _census(self, number: int, roles: Iterable[Role]) -> Counter[InstanceState]:
        if self._among[number] is None:
            return sum((self._shelves.states(number, role) for role in roles), Counter())
        wanted = set(roles)
        return Counter(i.state for i in self._members(number) if i.role in wanted)

    def _members(self, number: int) -> Iterator[Instance]:
        """Returns the instances of a kind that serve the model name that the request has."""
        entries = (self._shelves.entries[name] for name in self._among[number] or ())
        return (entry.instance for entry in entries if entry.kind == number)

    @property
    def _model(self) -> str:
        return "" if self._request.model is None else f" of model {self._request.model!r}"


def _most(instances: Iterable[Instance], most: Callable[[Instance], int]) -> Instance:
    """Returns the one that has most, the first by id of equals: every replica names the same."""
    return min(instances, key=lambda i: (-most(i), i.instance_id))
