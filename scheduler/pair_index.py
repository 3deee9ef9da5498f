"""The ready instances, sorted by load and place, so that a search need not look at all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice, product
from math import inf
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from kvxfer.errors import NoCapacity, NotAggregating, PromptTooLong
from kvxfer.instances import Instance, Role
from kvxfer.scheduler.checked_scorer import CheckedScorer
from kvxfer.scheduler.pairing import (
    SIDES,
    Kind,
    Pair,
    fabric_steps,
    kind_of,
    mismatch_of,
)
from kvxfer.scheduler.prefix_index import Level, PrefixIndex
from kvxfer.scheduler.refusing import Refusing
from kvxfer.scheduler.room import Room
from kvxfer.scheduler.scoring import Scorer, WeightedScorer, available_blocks, occupancy
from kvxfer.scheduler.sent_prompts import SentPrompts
from kvxfer.scheduler.shelves import (
    Entry,
    LoadKey,
    Shelf,
    Shelves,
    depths,
    more_room,
    places_of,
    stands,
)
from kvxfer.scheduler.topology import LABELS, distance, place_of
from kvxfer.transfers import AloneBecause, Score, Transfer, TransferRequest

# A choice looks at this many of the least loaded prefill instances.
_PREFILLS: Final = 16
# If very many instances have a block, a choice looks for it among this many of the least loaded.
_SIFTED: Final = 256
_APART_KEPT: Final = 4096

# (cost, used, prefill id, decode id): the lesser of two pairs is chosen.
_Weight: TypeAlias = tuple[float, float, str, str]
# The cost of a pair beside both loads, by the distance of the two.
_Apart: TypeAlias = list[float]


class _Search(Struct):
    """One choice: the blocks that the request takes per kind and side, the instances to leave out,
    and the results of earlier look-ups."""

    request: TransferRequest
    needs: dict[int, dict[Role, int]]
    among: dict[int, set[str] | None]
    """The instances of each kind that serve the request; None if all do."""
    avoid: dict[Role, frozenset[str]]
    """The instances to leave out on each side; empty in the last resort."""
    depths: dict[Role, dict[str, int]] = {}
    """The number of the request's hashes up to the deepest one that an instance has, by side and
    instance."""
    heads: dict[Shelf, list[LoadKey]] = {}
    few: dict[tuple[int, Role], dict[Shelf, list[LoadKey]] | None] = {}
    """The shelves of the instances that fit, for a kind and side where these are few."""


class PairIndex:
    """An index of instances, in one event loop. `put` and `remove` cost O(log n) comparisons."""

    def __init__(
        self,
        instances: Iterable[Instance] = (),
        *,
        scorer: Scorer | None = None,
        room: Room | None = None,
    ) -> None:
        """Tells `room` of every instance that can take more than before."""
        self._room = room or Room()
        self._scorer = scorer or WeightedScorer()
        if type(self._scorer) is not WeightedScorer:
            self._scorer = CheckedScorer(self._scorer)
        # A scorer's numbers follow from its arguments alone.
        self._apart = lru_cache(_APART_KEPT)(self._costs)
        self._prefixes, self._sent = PrefixIndex(), SentPrompts()
        self._shelves = Shelves()
        self._entries = self._shelves.entries
        self._kinds: dict[Kind, int] = {}
        self._last_kind = 0
        self._of_kind: Counter[int] = Counter()
        # Numbers of two kinds that match -> how many fabrics prefill prefers to the common one.
        self._matches: dict[tuple[int, int], int] = {}
        for instance in instances:
            self.put(instance)

    def put(self, instance: Instance) -> None:
        """Adds an instance, or updates the one with its id."""
        before = self._entries.get(instance.instance_id)
        if before is not None and before.instance.epoch == instance.epoch:
            kind, place = before.kind, before.place
            if instance.heartbeat_at != before.instance.heartbeat_at:
                self._sent.beat(instance.instance_id)
        else:
            kind, place = self._number(kind_of(instance)), place_of(instance.labels)
            self._uncache(instance.instance_id)
        load = self._scorer.load(instance), occupancy(instance), instance.instance_id
        entry = Entry(instance, kind, place, load, available_blocks(instance))
        self._shelves.put(entry)
        if before is None or before.kind != kind:
            self._of_kind[kind] += 1
            if before is not None:
                self._forget(before.kind)
        if before is None or more_room(before, entry):
            self._room.tell(instance)

    def remove(self, instance_id: str) -> None:
        self._uncache(instance_id)
        self._forget(self._shelves.remove(instance_id).kind)

    def publish(self, instance_id: str, added: bytes, removed: bytes, *, reset: bool) -> int:
        """Publishes as PrefixIndex.publish does, for an instance of this index."""
        return self._prefixes.publish(instance_id, added, removed, reset=reset)

    def sent(self, transfer: Transfer, hashes: tuple[int, ...]) -> None:
        """Notes that the prompt of a transfer opened here is on its way to both instances.

        It counts at instances that report cached blocks; others may have no cache.
        """
        sides = (party.instance_id for party, _ in transfer.sides)
        caching = [name for name in sides if self._prefixes.knows(name)]
        if hashes and caching:
            self._sent.open(transfer.transfer_id, caching, hashes)

    def ended(self, transfer_id: str) -> None:
        self._sent.end(transfer_id)

    def _uncache(self, instance_id: str) -> None:
        self._prefixes.remove(instance_id)
        self._sent.remove(instance_id)

    def choose(self, request: TransferRequest) -> Pair:
        """Returns the pair of least cost: two ready instances of one model with layouts that map.

        An aggregated request gets the least loaded instance that serves requests alone, on both
        sides. A request that may be aggregated gets such an instance if there are no pairs, or if
        one lacks little of the prompt (Scorer.alone_tokens). Otherwise:

        The cost is the scorer's (scheduler/scoring.py). Of equal pairs, the one with less of its KV
        cache in use comes first, then the first by id. An instance takes part if the blocks of the
        prompt are neither reserved by others nor reported as used. An instance to avoid takes part
        only if its side has no other.

        Looks at the 16 least loaded prefill instances of each kind and at those that have most of
        the prompt's prefix (PrefixIndex.longest). For each, looks at the least loaded decode
        instance of its NUMA node, host, rack, zone and of all, and at those that have most of the
        prefix. Raises PromptTooLong if the prompt fits into no cache at all, NoCapacity with the
        `reasons` if there is no pair, NotAggregating if no instance serves requests alone, and
        ScorerFailed if there is no pair whose cost is a number.
        """
        pair = self.find(request)
        if pair is None:
            raise self._refusal(request)
        return pair

    def _refusal(self, request: TransferRequest) -> NoCapacity | PromptTooLong | NotAggregating:
        if request.or_aggregated and not self._has_pairs(request):
            alone = replace(request, aggregated=True)
            refusal = Refusing(self._shelves, self._kinds, alone).refusal()
            if not isinstance(refusal, NotAggregating):
                return refusal
        return Refusing(self._shelves, self._kinds, request).refusal()

    def find(self, request: TransferRequest) -> Pair | None:
        """Returns the pair as `choose` does, or None if there is none."""
        avoid: frozenset[str] = frozenset(request.avoid)
        none: frozenset[str] = frozenset()
        if request.aggregated:
            return self._find_one(request, avoid)
        if request.or_aggregated and (pair := self._find_short(request, avoid)) is not None:
            return pair
        # One side with an instance to avoid is better than two.
        prefers = product((avoid, none), repeat=2) if avoid else [(none, none)]
        for prefills, decodes in prefers:
            pair = self._find(request, {Role.PREFILL: prefills, Role.DECODE: decodes})
            if pair is not None:
                return pair
        if request.or_aggregated and not self._has_pairs(request):
            return self._find_one(request, avoid, "no-pair")
        return None

    def _has_pairs(self, request: TransferRequest) -> bool:
        """Whether two ready instances could serve the request, once they have room."""
        among = {
            number: self._shelves.among(kind, request)
            for kind, number in self._kinds.items()
            if kind.serves(request)
        }
        return any(
            prefill != decode
            for ours, theirs in self._matches
            if ours in among and theirs in among
            for prefill, decode in product(
                self._shelves.two(ours, Role.PREFILL, among[ours]),
                self._shelves.two(theirs, Role.DECODE, among[theirs]),
            )
        )

    def _find(self, request: TransferRequest, avoid: dict[Role, frozenset[str]]) -> Pair | None:
        kinds = [(kind, number) for kind, number in self._kinds.items() if kind.serves(request)]
        search = self._search(request, kinds, avoid)
        if request.prefix_hashes:
            levels = self._prefixes.levels(request.prefix_hashes, self._sent)
            search.depths = {side: self._depths_of(search, side, levels) for side in SIDES}
        weights = (
            self._least_weight(search, ours, theirs, steps)
            for (ours, theirs), steps in self._matches.items()
            if ours in search.needs and theirs in search.needs
        )
        best = min((weight for weight in weights if weight is not None), default=None)
        if best is None:
            return None
        if isinstance(self._scorer, CheckedScorer) and best[0] == inf:
            raise self._scorer.nothing_to_choose()
        prefill, decode = (self._entries[instance_id] for instance_id in best[2:])
        return Pair(
            prefill.instance,
            decode.instance,
            search.needs[prefill.kind][Role.PREFILL],
            search.needs[decode.kind][Role.DECODE],
            self._tokens(search, Role.PREFILL, best[2]),
            score=self._score(search, *best[2:]) if request.explain else None,
        )

    def _find_short(self, request: TransferRequest, avoid: frozenset[str]) -> Pair | None:
        """Returns the decode instance of least cost that serves requests alone and lacks little of
        the prompt, as both sides of a pair."""
        most, prompt = self._scorer.alone_tokens, request.prompt_tokens
        if not most or prompt is None or (prompt > most and not request.prefix_hashes):
            return None
        search = self._search_one(request, avoid)
        levels = self._prefixes.levels(request.prefix_hashes, self._sent)
        cached = self._depths_of(search, Role.DECODE, levels)
        search.depths = {Role.DECODE: cached}
        heads = (next(self._fitting(search, (k, Role.DECODE, ())), None) for k in search.needs)
        loads = [head for head in heads if head is not None]
        loads += [self._entries[name].load for name in cached]
        costs = [
            (load[0] + self._scorer.decode(tokens), *load[1:])
            for load in loads
            if prompt - (tokens := self._tokens(search, Role.DECODE, load[2])) <= most
        ]
        if not costs:
            return None
        name = min(costs)[2]
        return self._alone(search, name, "short-prompt", self._tokens(search, Role.DECODE, name))

    def _search_one(self, request: TransferRequest, avoid: frozenset[str]) -> _Search:
        """Starts a search among the instances that serve requests alone."""
        kinds = [
            (kind, number)
            for kind, number in self._kinds.items()
            if kind.aggregates and kind.serves(request)
        ]
        return self._search(replace(request, aggregated=True), kinds, dict.fromkeys(SIDES, avoid))

    def _find_one(
        self, request: TransferRequest, avoid: frozenset[str], because: AloneBecause = ""
    ) -> Pair | None:
        """Returns the least loaded instance that can serve the request alone, as both sides of a
        pair. An instance to avoid is taken only if there is no other."""
        search = self._search_one(request, avoid)
        shelves = product(search.needs, SIDES)
        heads = (next(self._fitting(search, (kind, side, ())), None) for kind, side in shelves)
        least = min((head for head in heads if head is not None), default=None)
        if least is None:
            return self._find_one(request, frozenset(), because) if avoid else None
        return self._alone(search, least[2], because)

    def _alone(self, search: _Search, name: str, because: AloneBecause, cached: int = 0) -> Pair:
        entry = self._entries[name]
        score = None
        if search.request.explain:
            parts = {
                **self._scorer.load_parts(entry.instance),
                **(self._scorer.decode_parts(cached) if cached else {}),
            }
            score = Score(
                cost=sum(parts.values()),
                prefill=parts,
                decode={},
                pair={},
                distance=0,
                prefix_tokens=cached,
                decode_prefix_tokens=cached,
            )
        blocks = max(search.needs[entry.kind].values())
        return Pair(entry.instance, entry.instance, blocks, 0, cached, because, score)

    def _search(
        self,
        request: TransferRequest,
        kinds: Iterable[tuple[Kind, int]],
        avoid: dict[Role, frozenset[str]],
    ) -> _Search:
        search = _Search(request, {}, {}, avoid)
        for kind, number in kinds:
            among = self._shelves.among(kind, request)
            if among is None or among:
                search.needs[number] = self._shelves.needs(kind.layout, number, request, among)
                search.among[number] = among
        return search

    def _score(self, search: _Search, prefill_id: str, decode_id: str) -> Score:
        prefill, decode = self._entries[prefill_id], self._entries[decode_id]
        steps = self._matches[prefill.kind, decode.kind]
        apart = distance(prefill.place, decode.place)
        tokens = self._tokens(search, Role.PREFILL, prefill_id)
        at_decode = self._tokens(search, Role.DECODE, decode_id)
        scorer = self._scorer
        loads = prefill.load[0] + decode.load[0]
        return Score(
            cost=loads + scorer.pair(apart, steps, tokens) + scorer.decode(at_decode),
            prefill=dict(scorer.load_parts(prefill.instance)),
            decode={**scorer.load_parts(decode.instance), **scorer.decode_parts(at_decode)},
            pair=dict(scorer.pair_parts(apart, steps, tokens)),
            distance=apart,
            prefix_tokens=tokens,
            decode_prefix_tokens=at_decode,
        )

    def _depths_of(self, search: _Search, side: Role, levels: list[Level]) -> dict[str, int]:
        """Returns how deep the prefix is at the least loaded instances of a side, and at those that
        have most of it."""
        if not levels:
            return {}
        matching = {pair[SIDES.index(side)] for pair in self._matches}
        kinds = sorted(matching.intersection(search.needs))

        def least_loaded(count: int) -> Iterator[str]:
            for kind in kinds:
                fitting = self._fitting(search, (kind, side, ()))
                yield from (name for _, _, name in islice(fitting, count))

        def takes_part(name: str) -> bool:
            entry = self._entries[name]
            needs, among = search.needs.get(entry.kind), search.among.get(entry.kind)
            return (
                name not in search.avoid[side]
                and stands(entry, entry.kind, side)
                and needs is not None
                and entry.available >= needs[side]
                and (among is None or name in among)
            )

        return self._prefixes.longest(
            levels,
            asked=list(least_loaded(_PREFILLS)),
            least_loaded=lambda: least_loaded(_SIFTED),
            takes_part=takes_part,
        )

    def _tokens(self, search: _Search, side: Role, name: str) -> int:
        """Returns the tokens of the prompt that an instance is assumed to have in its cache."""
        depth, request = search.depths.get(side, {}).get(name, 0), search.request
        if not depth:
            return 0
        each = request.tokens_per_hash or self._entries[name].instance.layout.block_size
        return min(depth * each, request.prompt_tokens or depth * each)

    def _costs(self, steps: int, tokens: int) -> _Apart:
        return [self._scorer.pair(apart, steps, tokens) for apart in range(len(LABELS) + 1)]

    def _prefills(
        self, search: _Search, ours: int, steps: int
    ) -> Iterable[tuple[float, LoadKey, _Apart]]:
        """Returns the prefill instances to look at, ordered by the least cost of their pairs
        without the load of decode, then by use and id."""
        loads = islice(self._fitting(search, (ours, Role.PREFILL, ())), _PREFILLS)
        depths = search.depths.get(Role.PREFILL)
        if not depths:
            apart = self._apart(steps, 0)
            return ((load[0] + apart[0], load, apart) for load in loads)
        least = {load[2]: load for load in loads}
        cached = (self._entries[name] for name in depths if name not in least)
        least.update((entry.load[2], entry.load) for entry in cached if entry.kind == ours)
        found = []
        for load in least.values():
            apart = self._apart(steps, self._tokens(search, Role.PREFILL, load[2]))
            found.append((load[0] + apart[0], load, apart))
        found.sort(key=lambda item: (item[0], *item[1][1:]))
        return found

    def _least_weight(self, search: _Search, ours: int, theirs: int, steps: int) -> _Weight | None:
        """Returns the weight of the best pair of these two kinds."""
        everywhere = self._heads(search, (theirs, Role.DECODE, ()))
        if not everywhere:
            return None
        cached = self._cached_decodes(search, theirs)
        candidates = everywhere[:1] + cached
        # The least that decode adds.
        least = min(load[0] for load in candidates), min(load[1] for load in candidates)
        best: _Weight | None = None
        for floor, (load, used, name), apart in self._prefills(search, ours, steps):
            # No pair with this prefill instance, or one that comes after it, can weigh less.
            if best is not None and (floor + least[0], used + least[1], name, "") > best:
                break
            place, nearest = self._entries[name].place, 0
            for depth in depths(place):
                if best is not None and nearest and load + least[0] + apart[nearest] >= best[0]:
                    break  # an instance farther away costs no less
                heads = self._heads(search, (theirs, Role.DECODE, place[:depth]))
                nearest = len(LABELS) - depth + 1
                decode = next((head for head in heads if head[2] != name), None)
                if decode is not None:
                    best = self._lesser(best, (load, used, name), decode, apart)
            for decode in cached:
                if decode[2] != name:
                    best = self._lesser(best, (load, used, name), decode, apart)
        return best

    def _lesser(
        self, best: _Weight | None, prefill: LoadKey, decode: LoadKey, apart: _Apart
    ) -> _Weight:
        steps = distance(self._entries[prefill[2]].place, self._entries[decode[2]].place)
        cost, used = prefill[0] + decode[0] + apart[steps], prefill[1] + decode[1]
        weight = (cost, used, prefill[2], decode[2])
        return weight if best is None else min(best, weight)

    def _cached_decodes(self, search: _Search, kind: int) -> list[LoadKey]:
        """Returns the decode instances that have part of the prompt's prefix, by their loads less
        the worth of that part."""
        found = []
        for name in search.depths.get(Role.DECODE, ()):
            entry = self._entries[name]
            if entry.kind == kind:
                worth = self._scorer.decode(self._tokens(search, Role.DECODE, name))
                found.append((entry.load[0] + worth, *entry.load[1:]))
        return found

    def _heads(self, search: _Search, shelf: Shelf) -> list[LoadKey]:
        """Returns the first two that fit: the first may be the prefill instance itself."""
        heads = search.heads.get(shelf)
        if heads is None:
            heads = search.heads[shelf] = list(islice(self._fitting(search, shelf), 2))
        return heads

    def _fitting(self, search: _Search, shelf: Shelf) -> Iterator[LoadKey]:
        """Returns the loads of the instances that serve the request and have blocks for the prompt,
        neither reserved by others nor reported as used. The least loaded come first."""
        kind, side, _ = shelf
        if (kind, side) not in search.few:
            search.few[kind, side] = self._few(search, kind, side)
        few = search.few[kind, side]
        if few is not None:
            return iter(few.get(shelf, ()))
        need, among = search.needs[kind][side], search.among[kind]
        entries, avoid = self._entries, search.avoid[side]
        return (
            load
            for load in self._shelves.loads(shelf)
            if entries[load[2]].available >= need
            and load[2] not in avoid
            and (among is None or load[2] in among)
        )

    def _few(self, search: _Search, kind: int, side: Role) -> dict[Shelf, list[LoadKey]] | None:
        entries = self._shelves.few(kind, side, search.needs[kind][side], search.among[kind])
        if entries is None:
            return None
        shelves: dict[Shelf, list[LoadKey]] = {}
        for entry in sorted(entries, key=lambda entry: entry.load):
            if entry.load[2] not in search.avoid[side]:
                for place in places_of(entry, side):
                    shelves.setdefault((kind, side, place), []).append(entry.load)
        return shelves

    def _number(self, kind: Kind) -> int:
        number = self._kinds.get(kind)
        if number is None:
            self._last_kind += 1
            number = self._kinds[kind] = self._last_kind
            for other, its in self._kinds.items():
                if mismatch_of(kind, other) is None:
                    self._matches[number, its] = fabric_steps(kind, other)
                if mismatch_of(other, kind) is None:
                    self._matches[its, number] = fabric_steps(other, kind)
        return number

    def _forget(self, number: int) -> None:
        """Counts one instance less of this kind, and drops a kind without instances."""
        self._of_kind[number] -= 1
        if not self._of_kind[number]:
            del self._of_kind[number]
            self._kinds = {kind: its for kind, its in self._kinds.items() if its != number}
            self._matches = {
                pair: steps for pair, steps in self._matches.items() if number not in pair
            }


def choose_pair(
    instances: Iterable[Instance], request: TransferRequest, *, scorer: Scorer | None = None
) -> Pair:
    """Chooses as PairIndex.choose does, among these instances."""
    return PairIndex(instances, scorer=scorer).choose(request)
