"""A digest of the weights of a model, from its files or from its tensors as they are loaded.

It covers the name, shape and dtype of each tensor, and two samples of at most 512 bytes of its data
(row-major, little-endian): around the middle, and at a place that follows from its name. It does
not depend on parallel sizes, kernels, the number of files or the order of tensors, and takes a
fraction of the time of reading all data. Training changes every tensor; a change of a few elements
by hand may go unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

from kvxfer.errors import InvalidArgument

_SAMPLE_BYTES: Final = 512
_DIGEST_BYTES: Final = 16
_MAX_HEADER_BYTES: Final = 100 << 20  # as safetensors itself

Shape: TypeAlias = tuple[int, ...]
Read: TypeAlias = Callable[[int, int], bytes]
"""Reads a tensor's bytes; takes an offset and a size."""

# safetensors' name -> torch's.
_DTYPES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


class CheckpointDigest:
    """Takes the tensors of a model, in any order."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def add(self, name: str, shape: Iterable[int], dtype: str, nbytes: int, read: Read) -> None:
        """Adds a tensor. `dtype` is torch's name without its prefix. A tensor that is added again
        counts once."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        digest.update(json.dumps([name, list(shape), dtype, nbytes]).encode())
        size = min(nbytes, _SAMPLE_BYTES)
        last = nbytes - size
        for offset in (last // 2, _place(name) % (last + 1)):
            digest.update(read(offset, size))
        self._digests[name] = digest.digest()

    def __len__(self) -> int:
        return len(self._digests)

    def hexdigest(self) -> str:
        """Returns the digest of all tensors so far: 32 hexadecimal digits."""
        whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for name in sorted(self._digests):
            whole.update(self._digests[name])
        return whole.hexdigest()


def digest_of_folder(folder: Path) -> str:
    """Returns the digest of a checkpoint folder's safetensors files.

    Raises InvalidArgument if there are none, or one is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidArgument(
            f"{folder} has no safetensors files to identify its weights by; give them a name"
        )
    digest = CheckpointDigest()
    for path in files:
        try:
            with path.open("rb") as file:
                _add_file(digest, file, path.stat().st_size)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise InvalidArgument(
                f"{path} is not a safetensors file ({error}); download it again"
            ) from error
    return digest.hexdigest()


def digest_of_tensors(tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> str:
    """Returns the digest of torch tensors by the names that they have in the checkpoint."""
    digest = CheckpointDigest()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        digest.add(name, tensor.shape, dtype, tensor.nbytes, _reader(tensor))
    return digest.hexdigest()


def _reader(tensor: Any) -> Read:
    import torch

    def read(offset: int, size: int) -> bytes:
        if not size:
            return b""
        width = tensor.element_size()
        first, end = offset // width, -(-(offset + size) // width)
        # Only these elements leave a device.
        some = tensor.detach().reshape(-1)[first:end].contiguous().cpu()
        data = some.view(torch.uint8).numpy().tobytes()
        return bytes(data[offset - first * width :][:size])

    return read


def _add_file(digest: CheckpointDigest, file: BinaryIO, size: int) -> None:
    (length,) = struct.unpack("<Q", file.read(8))
    if length > min(_MAX_HEADER_BYTES, size - 8):
        raise ValueError(f"its header has {length} bytes")
    base = 8 + length
    for name, shape, dtype, begin, end in _tensors(file.read(length)):
        if not 0 <= begin <= end <= size - base:
            raise ValueError(f"tensor {name} lies outside of it")

        def read(offset: int, count: int, begin: int = begin) -> bytes:
            file.seek(base + begin + offset)
            return file.read(count)

        digest.add(name, shape, dtype, end - begin, read)


def _tensors(header: bytes) -> Iterator[tuple[str, Shape, str, int, int]]:
    for name, told in json.loads(header).items():
        if name != "__metadata__":
            begin, end = told["data_offsets"]
            yield name, tuple(told["shape"]), _DTYPES.get(told["dtype"], told["dtype"]), begin, end


def _place(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
