"""The layout of a KV cache in memory. Two instances compare theirs before they move a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Final, Literal, NamedTuple, Self, TypeAlias

from msgspec import Meta

from kvxfer.errors import InvalidArgument
from kvxfer.settings import check_bounds

Part: TypeAlias = Literal["K", "V", "KV"]
HeadOrder: TypeAlias = Literal["NHD", "HND"]
KvArrangement: TypeAlias = Literal["separate", "interleaved", "joined", "opaque", "state"]

ITEM_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}

# Layouts also come from other processes, so work per rank or layer needs a bound.
_MOST: Final = 1 << 16
_MOST_ELEMENTS: Final = 1 << 30
_MOST_RANKS: Final = 1024
_MOST_SHAPES: Final = 64
MOST_SECTIONS: Final = 64
_LONGEST_NAME: Final = 32

_Size: TypeAlias = Annotated[int, Meta(ge=1, le=_MOST)]
_Elements: TypeAlias = Annotated[int, Meta(ge=1, le=_MOST_ELEMENTS)]
_Ranks: TypeAlias = Annotated[int, Meta(ge=1, le=_MOST_RANKS)]
_Rank: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST_RANKS)]
_Group: TypeAlias = Annotated[int, Meta(ge=0, le=_MOST)]


class Packing(NamedTuple):
    """An engine's own order of K or V of one head of a block.

    It has `rows` rows. In each row, every `tokens` tokens make a unit of
    `head_size * tokens / rows` elements. Units are the same for every block size.
    """

    rows: int
    tokens: int


def packing_of(name: str, head_size: int) -> tuple[Packing, Packing] | None:
    """Returns the packings of K and of V, which follow each other; None if the name is unknown.

    Both known orders are those of vLLM's CPU attention.

    - `vec`: K is transposed, `[head_size, tokens]`; V is `[tokens, head_size]`
    - `amx`: K is `[tokens / 16, 16 * head_size]`, V `[head_size / 16, tokens / 2, 16 * 2]`
    """
    if name == "vec":
        return Packing(head_size, 1), Packing(1, 1)
    if name == "amx":
        return Packing(1, 16), Packing(head_size // 16, 2)
    return None


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of some layers of a model, if not all are equal. The fields are as in KvLayout."""

    num_kv_heads: Annotated[_Size, Meta(examples=[1])]
    head_size: Annotated[_Elements, Meta(examples=[132])]
    dtype: Annotated[str, Meta(examples=["uint8"])]
    order: HeadOrder = "NHD"
    kv: KvArrangement = "separate"
    mla: bool = False
    packing: Annotated[str, Meta(max_length=_LONGEST_NAME)] = ""
    sections: Annotated[tuple[_Elements, ...], Meta(max_length=MOST_SECTIONS)] = ()
    block_size: Annotated[int, Meta(ge=0, le=_MOST)] = 0
    """Tokens per block, a multiple of the layout's; 0 for the layout's own."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV cache of one rank of one instance.

    A *block* holds `block_size` tokens of one layer. A rank keeps the blocks of a layer in planes:

    - `kv="separate"`: two, K and V, each `[num_blocks, block_size, heads, head_size]`
    - `kv="interleaved"`: one, `[num_blocks, 2, block_size, heads, head_size]`
    - `kv="joined"`: one, `[num_blocks, block_size, heads, head_size]`: the `head_size` elements are
      all that the engine keeps of one head of one token, K and V side by side, in the form that
      `packing` names. Both sides must have the same form
    - `kv="opaque"`: one, `[num_blocks, heads, bytes]`: K and V of a head of a block are in the
      engine's own order, which `packing` names. Block sizes must be equal on both sides, unless
      packing_of() knows the order
    - `kv="state"`: one, `[num_blocks, bytes]`: the state that a recurrent layer (Mamba, linear
      attention) keeps of all tokens up to the last one of the block. It has `sections` (such as
      convolution and recurrence), one after the other, each `[heads, section]`; a head has
      `head_size` elements in all sections together. Only the last block of a prompt is required
    - `mla=True`: one, `[num_blocks, block_size, head_size]`, whatever `kv` says: K and V are one
      latent vector per token, whole on every TP rank

    with `heads` and `block_size` swapped if `order="HND"`.

    `layer_groups` names the KV cache group of each layer if each group has its own block ids. A
    transfer then has a block table for each group, in which blocks may be absent. The tables have
    the same number of entries, one for each `block_size` tokens. The shape of a group's layers may
    give its blocks more tokens: then each block is in the last of the entries of its tokens.

    If layers keep different data of a token (a draft model, the indexer of sparse attention),
    `layer_shapes` names the shape of each layer: 0 stands for the fields here, `n` for
    `shapes[n - 1]`. The properties of a layer below then hold only for `of_layer()`.

    Every field describes the whole model, except `tp_rank` and `pp_rank`. Raises InvalidArgument
    that names the field, its value and the remedy.
    """

    num_layers: Annotated[_Size, Meta(examples=[28])]
    num_kv_heads: Annotated[_Size, Meta(examples=[8])]
    """KV heads before tensor parallelism."""
    head_size: Annotated[_Elements, Meta(examples=[128])]
    """Elements of one head of one token; with `kv` joined, of K and V together; with `kv` state, of
    the whole block."""
    dtype: Annotated[str, Meta(examples=["bfloat16"])]
    """Element type as torch names it."""
    block_size: Annotated[_Size, Meta(examples=[16])]
    """Tokens per block."""
    tp_size: _Ranks = 1
    tp_rank: _Rank = 0
    pp_size: _Ranks = 1
    pp_rank: _Rank = 0
    order: HeadOrder = "NHD"
    """Tokens before heads (NHD), or heads before tokens (HND)."""
    kv: KvArrangement = "separate"
    """K and V in two planes, in one, side by side for each token, or in the engine's own order; or
    a recurrent state."""
    mla: bool = False
    """Whether K and V are one latent vector per token."""
    packing: Annotated[str, Meta(max_length=_LONGEST_NAME)] = ""
    """Name of the engine's own order or form, with `kv` opaque, joined or state."""
    sections: Annotated[tuple[_Elements, ...], Meta(max_length=MOST_SECTIONS)] = ()
    """Elements of a head in each section, with `kv` state."""
    layer_groups: Annotated[tuple[_Group, ...], Meta(max_length=_MOST)] = ()
    """KV cache group of each layer, if groups have separate block ids."""
    shapes: Annotated[tuple[LayerShape, ...], Meta(max_length=_MOST_SHAPES)] = ()
    """Shapes of layers that differ from the fields above."""
    layer_shapes: Annotated[tuple[_Group, ...], Meta(max_length=_MOST)] = ()
    """Shape of each layer, if there are several: 0, or n for shapes[n - 1]."""

    def __post_init__(self) -> None:
        check_bounds(self, "KvLayout.")
        if self.kv != "state" and self.head_size > _MOST:
            raise InvalidArgument(f"KvLayout.head_size is {self.head_size}; use {_MOST} or less")
        if self.dtype not in ITEM_BYTES:
            raise InvalidArgument(
                f"KvLayout.dtype is {self.dtype!r}; use one of {', '.join(ITEM_BYTES)}"
            )
        if self.mla and self.num_kv_heads != 1:
            raise InvalidArgument(
                f"KvLayout.num_kv_heads is {self.num_kv_heads} with mla=True; "
                "an MLA cache has one latent head: pass 1"
            )
        if (self.opaque or self.state) and self.order != "HND":
            raise InvalidArgument(
                f"KvLayout.order is {self.order!r} with kv={self.kv!r}, which has heads outermost; "
                "pass 'HND'"
            )
        self._require_packing()
        self._require_sections()
        self._require_layer_groups()
        self._require_shapes()
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            if getattr(self, rank) >= getattr(self, size):
                raise InvalidArgument(
                    f"KvLayout.{rank} is {getattr(self, rank)} of {size} {getattr(self, size)}; "
                    f"ranks count from 0 to {size} - 1"
                )
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            raise InvalidArgument(
                f"KvLayout.tp_size is {self.tp_size} for {self.num_kv_heads} KV heads; "
                "choose one that divides the number of heads, or is a multiple of it"
            )
        if self.num_layers % self.pp_size:
            raise InvalidArgument(
                f"KvLayout.pp_size is {self.pp_size} for {self.num_layers} layers; "
                "choose one that divides the number of layers"
            )

    def _require_packing(self) -> None:
        if self.packing and not (self.opaque or self.joined or self.state):
            raise InvalidArgument(
                f"KvLayout.packing is {self.packing!r} with kv={self.kv!r} and mla={self.mla}; "
                "only kv='opaque', 'joined' and 'state' have one: pass ''"
            )
        if self.packing == "amx" and (self.block_size % 16 or self.head_size % 16):
            raise InvalidArgument(
                f"KvLayout.packing is 'amx' with block_size {self.block_size} and head_size "
                f"{self.head_size}; both have to be multiples of 16"
            )

    def _require_sections(self) -> None:
        sections = self.sections
        sizes = all(isinstance(size, int) and size > 0 for size in sections)
        if self.state and sizes and sections:
            possible = sum(sections) == self.head_size
        else:
            possible = not self.state and not sections
        if possible:
            return
        raise InvalidArgument(
            f"KvLayout.sections is {sections!r} with kv={self.kv!r} and head_size "
            f"{self.head_size}; with kv='state' pass sizes that add up to "
            "head_size, otherwise ()"
        )

    def _require_layer_groups(self) -> None:
        groups = self.layer_groups
        if groups and (
            not all(isinstance(group, int) for group in groups)
            or len(groups) != self.num_layers
            or sorted(set(groups)) != list(range(len(set(groups))))
        ):
            raise InvalidArgument(
                f"KvLayout.layer_groups is {groups!r} for {self.num_layers} layers; pass the group "
                "of each layer, counted from 0, or () if there are none"
            )

    def _require_shapes(self) -> None:
        shapes, of_layers = self.shapes, self.layer_shapes
        if not shapes and not of_layers:
            return
        if (
            not all(isinstance(shape, int) for shape in of_layers)
            or len(of_layers) != self.num_layers
            or sorted(set(of_layers)) != list(range(len(shapes) + 1))
        ):
            raise InvalidArgument(
                f"KvLayout.layer_shapes is {of_layers!r} for {self.num_layers} layers and "
                f"{len(shapes)} shapes beside the layout's own; pass the shape of each layer, each "
                "of them used, or () if all layers have the same"
            )
        for shape in range(len(shapes) + 1):
            self.of_shape(shape)  # raises if the shape is not possible
        self._require_block_sizes()

    def _require_block_sizes(self) -> None:
        """Raises InvalidArgument unless layers with the same block ids have blocks of one size."""
        if not any(shape.block_size for shape in self.shapes):
            return
        for shape in self.shapes:
            if shape.block_size % self.block_size or (shape.block_size and shape.kv == "state"):
                raise InvalidArgument(
                    f"KvLayout.shapes has a shape with kv={shape.kv!r} and block_size "
                    f"{shape.block_size}; pass a multiple of the layout's {self.block_size}, or 0 "
                    "for the same, and 0 for every state"
                )
        sizes = [self.block_size, *(each.block_size or self.block_size for each in self.shapes)]
        pairs = zip(self.layer_groups, self.layer_shapes, strict=False)
        of_groups = {(group, sizes[shape]) for group, shape in pairs}
        if len(of_groups) != len(set(self.layer_groups)) or not of_groups:
            raise InvalidArgument(
                f"KvLayout.shapes has blocks of {sorted(set(sizes))} tokens with layer_groups "
                f"{self.layer_groups!r}; put layers with blocks of different sizes into different "
                "groups"
            )

    @classmethod
    def from_layers(
        cls,
        of_layers: Sequence[LayerShape],
        block_size: int,
        *,
        tp_size: int = 1,
        tp_rank: int = 0,
        layer_groups: tuple[int, ...] = (),
    ) -> Self:
        """Returns the layout of layers of these shapes. Raises InvalidArgument, also if none of
        them has blocks of `block_size` tokens."""
        shapes = sorted(dict.fromkeys(of_layers), key=lambda shape: shape.block_size)
        if smallest := shapes[0].block_size:
            raise InvalidArgument(
                f"no layer has blocks of {block_size} tokens, the smallest have {smallest}; make "
                f"{smallest} the block size"
            )
        return cls(
            num_layers=len(of_layers),
            **asdict(shapes[0]) | {"block_size": block_size},
            tp_size=tp_size,
            tp_rank=tp_rank,
            layer_groups=layer_groups,
            shapes=tuple(shapes[1:]),
            layer_shapes=tuple(map(shapes.index, of_layers)) if len(shapes) > 1 else (),
        )

    def of_shape(self, shape: int) -> KvLayout:
        """Returns the layout as if all layers had that shape, without groups."""
        if not self.shapes:
            return self
        own = self.shapes[shape - 1] if shape else None
        said = {field.name: getattr(own, field.name) for field in fields(own)} if own else {}
        said["block_size"] = said.get("block_size") or self.block_size
        return replace(self, layer_groups=(), shapes=(), layer_shapes=(), **said)

    def of_layer(self, layer: int) -> KvLayout:
        """Returns the layout as if all layers had the shape of this one, counted on this rank."""
        return self.of_shape(self.layer_shapes[self.first_layer + layer]) if self.shapes else self

    @property
    def of_layers(self) -> tuple[KvLayout, ...]:
        """The result of of_layer() for each layer of this rank."""
        count = self.layers_per_rank
        if not self.shapes:
            return (self,) * count
        by_shape = [self.of_shape(shape) for shape in range(len(self.shapes) + 1)]
        first = self.first_layer
        return tuple(by_shape[shape] for shape in self.layer_shapes[first : first + count])

    @property
    def num_ranks(self) -> int:
        """Ranks of the instance."""
        return self.pp_size * self.tp_size

    @property
    def rank(self) -> int:
        """The number of this rank in its instance: by stage, and within a stage by `tp_rank`."""
        return self.pp_rank * self.tp_size + self.tp_rank

    def of_rank(self, rank: int) -> KvLayout:
        """Returns the layout of another rank of the same instance."""
        pp_rank, tp_rank = divmod(rank, self.tp_size)
        return replace(self, pp_rank=pp_rank, tp_rank=tp_rank)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def heads_per_rank(self) -> int:
        """KV heads on this rank. With more ranks than heads, each head is repeated."""
        return max(1, self.num_kv_heads // self.tp_size)

    @property
    def first_head(self) -> int:
        """The whole-model index of this rank's first KV head."""
        return self.tp_rank * self.num_kv_heads // self.tp_size

    @property
    def head_replicas(self) -> int:
        """Ranks of a pipeline stage that have the same KV heads as this one, including itself."""
        return max(1, self.tp_size // self.num_kv_heads)

    @property
    def layers_per_rank(self) -> int:
        """Layers on this pipeline stage."""
        return self.num_layers // self.pp_size

    @property
    def first_layer(self) -> int:
        """The whole-model index of this pipeline stage's first layer."""
        return self.pp_rank * self.layers_per_rank

    @property
    def num_groups(self) -> int:
        """The number of block tables of a transfer."""
        return max(self.layer_groups, default=0) + 1

    def group_of(self, layer: int) -> int:
        """Returns the KV cache group of a layer of this rank."""
        return self.layer_groups[self.first_layer + layer] if self.layer_groups else 0

    @property
    def parts(self) -> tuple[Part, ...]:
        """The planes of a layer."""
        return ("K", "V") if self.kv == "separate" and not self.mla else ("KV",)

    @property
    def opaque(self) -> bool:
        """Whether K and V of one head of a block are in the engine's own order."""
        return self.kv == "opaque" and not self.mla

    @property
    def joined(self) -> bool:
        """Whether K and V of one head of one token are side by side, to be moved as one vector."""
        return self.kv == "joined" and not self.mla

    @property
    def state(self) -> bool:
        """Whether a block is the state of a recurrent layer, whatever its number of tokens."""
        return self.kv == "state" and not self.mla

    @property
    def packings(self) -> tuple[Packing, Packing] | None:
        """The order of K and V of a head of a block, if the layout is opaque and it is known."""
        return packing_of(self.packing, self.head_size) if self.opaque else None

    @property
    def vectors(self) -> int:
        """Separate vectors of a head of a token: K and V, or one for both."""
        return 1 if self.mla or self.opaque or self.joined or self.state else 2

    @property
    def vector_bytes(self) -> int:
        """Bytes of one head of one token: K or V alone, or both if they are joined or opaque. For a
        state, bytes of one head of one block."""
        return self.head_size * self.item_bytes * (2 if self.opaque else 1)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer on this rank, K and V together; 0 for a state."""
        return 0 if self.state else self.vectors * self.heads_per_rank * self.vector_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer on this rank, K and V together."""
        if self.state:
            return self.heads_per_rank * self.vector_bytes
        return self.block_size * self.token_bytes

    @property
    def part_bytes(self) -> int:
        """Bytes of one block in one plane of a layer."""
        return self.block_bytes // len(self.parts)

    @property
    def stack_bytes(self) -> int:
        """Bytes of one block in all layers of this rank."""
        return sum(layer.block_bytes for layer in self.of_layers)

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)
