"""The header of a GGUF file: metadata and where each tensor lies. Source: ggml's docs/gguf.md, versions 2 and 3.

Owns the file format's rules and refuses everything that breaks them, before it is used as a length or an offset. Never
reads tensor data and never dequantises. Called by `protocol.model_files` and by the engine's weight loader.
"""

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NoReturn

# A real header is a few MiB (a 256k-token vocabulary with merges: 20). The limits keep a damaged or hostile file from
# costing memory or time: nothing is read beyond MAX_HEADER_BYTES and no count is believed above its limit.
MAX_HEADER_BYTES = 256 * 1024 * 1024
MAX_METADATA_PAIRS = 65_536
MAX_TENSORS = 65_536
MAX_ARRAY_ITEMS = 8 * 1024 * 1024
MAX_KEY_BYTES = 65_535
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1024 * 1024
DEFAULT_ALIGNMENT = 32

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MIN_PAIR_BYTES = 8  # the key's length; no more, so that a file that ends after an empty key hears of the key
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8  # name length, one byte of name, rank, one dimension, type, offset


class ModelFilesError(ValueError):
    """A model's files are absent or broken. The message is one sentence that names the file and the reason."""


class GGMLType(IntEnum):
    """How a tensor's elements are stored: blocks of `block_size` elements in `block_bytes` bytes.

    Q8_1 and Q8_K are absent: ggml makes them while it multiplies and never stores them.
    """

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39

    @property
    def block_size(self) -> int:
        """Elements per block."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _BLOCKS[self][1]


_BLOCKS: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q2_K: (256, 84),
    GGMLType.Q3_K: (256, 110),
    GGMLType.Q4_K: (256, 144),
    GGMLType.Q5_K: (256, 176),
    GGMLType.Q6_K: (256, 210),
    GGMLType.IQ2_XXS: (256, 66),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ3_XXS: (256, 98),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ4_XS: (256, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.MXFP4: (32, 17),
}


class _ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# struct codes of the fixed-size value types; BOOL is read as a byte so that 2..255 can be refused.
_CODES = {
    _ValueType.UINT8: "B",
    _ValueType.INT8: "b",
    _ValueType.UINT16: "H",
    _ValueType.INT16: "h",
    _ValueType.UINT32: "I",
    _ValueType.INT32: "i",
    _ValueType.FLOAT32: "f",
    _ValueType.BOOL: "B",
    _ValueType.UINT64: "Q",
    _ValueType.INT64: "q",
    _ValueType.FLOAT64: "d",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` in torch order (outermost first), `offset` in bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """A validated header. Metadata values are int, float, bool, str, or a tuple of one of these."""

    version: int
    metadata: dict[str, object]
    tensors: tuple[TensorInfo, ...]
    data_offset: int  # bytes; where tensor data begins
    alignment: int  # bytes

    @cached_property
    def tensors_by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}


def read_header(path: Path) -> GGUFHeader:
    """Read and validate the header of `path`; 49k tokens and merges take about 40 ms.

    Raises `ModelFilesError` for anything that is not a complete GGUF file: every tensor must lie inside the file.
    """
    if path.is_dir():
        raise ModelFilesError(f"{path} is a directory, not a GGUF file")
    if not path.is_file():
        raise ModelFilesError(f"{path} does not exist or is not a regular file")
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise ModelFilesError(f"{path} is empty, not a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderReader(path, data).read()
    except OSError as error:
        raise ModelFilesError(f"{path} cannot be read: {error.strerror or error}") from error


class _HeaderReader:
    """One pass over the header; `position` only moves forward, and only over bytes that exist."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, MAX_HEADER_BYTES)
        self.position = 0

    def read(self) -> GGUFHeader:
        version = self._read_version()
        num_tensors = self._read_count("tensors", MAX_TENSORS, _MIN_TENSOR_BYTES)
        num_pairs = self._read_count("metadata pairs", MAX_METADATA_PAIRS, _MIN_PAIR_BYTES)
        metadata: dict[str, object] = {}
        for index in range(num_pairs):
            key = self._read_key(f"metadata key {index}")
            if key in metadata:
                self._refuse(f"metadata key {key!r} appears twice")
            metadata[key] = self._read_value(key)
        if num_tensors == 0:
            self._refuse("it holds no tensors")
        alignment = self._alignment(metadata)
        relative = [self._read_tensor(index) for index in range(num_tensors)]
        data_offset = -(-self.position // alignment) * alignment
        tensors = self._place(relative, data_offset, alignment)
        return GGUFHeader(version, metadata, tensors, data_offset, alignment)

    def _read_version(self) -> int:
        if self.data[:4] != _MAGIC:
            self._refuse("it does not begin with the GGUF magic number")
        self.position = 4
        version: int = self._unpack("I", "the version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            self._refuse("it is big-endian, which is not supported")
        if version not in _VERSIONS:
            self._refuse(f"GGUF version {version} is not supported (2 and 3 are)")
        return version

    def _read_count(self, what: str, limit: int, min_bytes: int) -> int:
        count: int = self._unpack("Q", f"the number of {what}")
        if count > limit:
            self._refuse(f"it claims {count} {what}; the limit is {limit}")
        if count * min_bytes > self.end - self.position:
            self._refuse(f"it claims {count} {what}, more than fit in the file")
        return count

    def _read_key(self, what: str) -> str:
        key = self._read_string(what, MAX_KEY_BYTES)
        if not key:
            self._refuse(f"{what} is empty")
        return key

    def _read_value(self, key: str) -> object:
        value_type = self._read_value_type(key)
        if value_type is _ValueType.STRING:
            return self._read_string(f"the value of {key!r}", MAX_HEADER_BYTES)
        if value_type is _ValueType.ARRAY:
            return self._read_array(key)
        value = self._unpack(_CODES[value_type], f"the value of {key!r}")
        return self._as_bools(key, (value,))[0] if value_type is _ValueType.BOOL else value

    def _read_array(self, key: str) -> tuple[object, ...]:
        item_type = self._read_value_type(key)
        if item_type is _ValueType.ARRAY:
            self._refuse(f"metadata key {key!r} is an array of arrays, which is not supported")
        min_bytes = 8 if item_type is _ValueType.STRING else struct.calcsize(f"<{_CODES[item_type]}")
        count = self._read_count(f"items of {key!r}", MAX_ARRAY_ITEMS, min_bytes)
        if item_type is _ValueType.STRING:
            return self._read_strings(key, count)
        values = struct.unpack_from(f"<{count}{_CODES[item_type]}", self.data, self.position)
        self.position += count * min_bytes
        return self._as_bools(key, values) if item_type is _ValueType.BOOL else values

    def _read_strings(self, key: str, count: int) -> tuple[str, ...]:
        # The one loop that runs 100 000 times: local names and one decode per item instead of _read_string.
        data, position, end = self.data, self.position, self.end
        unpack_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            if position + 8 > end:
                self._refuse(f"it ends inside the items of {key!r}")
            start = position + 8
            position = start + unpack_length(data, position)[0]
            if position > end:
                self._refuse(f"an item of {key!r} runs past the end of the header")
            strings.append(data[start:position])
        self.position = position
        try:
            return tuple([item.decode() for item in strings])
        except UnicodeDecodeError:
            self._refuse(f"an item of {key!r} is not valid UTF-8")

    def _as_bools(self, key: str, values: tuple[object, ...]) -> tuple[bool, ...]:
        if any(value not in (0, 1) for value in values):
            self._refuse(f"metadata key {key!r} holds a boolean that is neither 0 nor 1")
        return tuple(bool(value) for value in values)

    def _read_value_type(self, key: str) -> _ValueType:
        number = self._unpack("I", f"the type of {key!r}")
        try:
            return _ValueType(number)
        except ValueError:
            self._refuse(f"metadata key {key!r} has the unknown value type {number}")

    def _alignment(self, metadata: dict[str, object]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or not 1 <= alignment <= MAX_ALIGNMENT:
            self._refuse(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, got {alignment!r:.40}")
        if alignment & (alignment - 1):
            self._refuse(f"general.alignment must be a power of two, got {alignment}")
        return alignment

    def _read_tensor(self, index: int) -> TensorInfo:
        name = self._read_key(f"the name of tensor {index}")
        rank = self._unpack("I", f"the rank of tensor {name!r}")
        if not 1 <= rank <= MAX_DIMENSIONS:
            self._refuse(f"tensor {name!r} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are supported")
        dimensions: tuple[int, ...] = tuple(self._unpack("Q", f"the shape of {name!r}") for _ in range(rank))
        if 0 in dimensions:
            self._refuse(f"tensor {name!r} has a dimension of zero")
        number = self._unpack("I", f"the type of tensor {name!r}")
        try:
            ggml_type = GGMLType(number)
        except ValueError:
            self._refuse(f"tensor {name!r} has the unknown type {number}")
        if dimensions[0] % ggml_type.block_size:
            self._refuse(
                f"tensor {name!r} has rows of {dimensions[0]} elements, not a multiple of {ggml_type.name}'s "
                f"block of {ggml_type.block_size}"
            )
        num_bytes = prod(dimensions) // ggml_type.block_size * ggml_type.block_bytes
        offset = self._unpack("Q", f"the offset of tensor {name!r}")
        return TensorInfo(name, dimensions[::-1], ggml_type, offset, num_bytes)

    def _place(self, relative: list[TensorInfo], data_offset: int, alignment: int) -> tuple[TensorInfo, ...]:
        """Turn offsets relative to `data_offset` into absolute ones; refuse tensors outside the file or overlapping."""
        if len({tensor.name for tensor in relative}) != len(relative):
            self._refuse("two tensors have the same name")
        placed = []
        for tensor in relative:
            if tensor.offset % alignment:
                self._refuse(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
            offset = data_offset + tensor.offset
            if offset + tensor.num_bytes > self.size:
                self._refuse(
                    f"tensor {tensor.name!r} ends at byte {offset + tensor.num_bytes} of a file of {self.size}: "
                    "it is truncated or damaged"
                )
            placed.append(TensorInfo(tensor.name, tensor.shape, tensor.type, offset, tensor.num_bytes))
        by_offset = sorted(placed, key=lambda tensor: tensor.offset)
        for before, after in pairwise(by_offset):
            if before.offset + before.num_bytes > after.offset:
                self._refuse(f"tensors {before.name!r} and {after.name!r} overlap")
        return tuple(placed)

    def _read_string(self, what: str, limit: int) -> str:
        length = self._unpack("Q", f"the length of {what}")
        if length > limit or length > self.end - self.position:
            self._refuse(f"{what} claims {length} bytes, more than fit")
        start, self.position = self.position, self.position + length
        try:
            return self.data[start : self.position].decode()
        except UnicodeDecodeError:
            self._refuse(f"{what} is not valid UTF-8")

    def _unpack(self, code: str, what: str) -> int:
        """One little-endian value of struct code `code` (a float for codes f and d)."""
        size = struct.calcsize(f"<{code}")
        if size > self.end - self.position:
            self._refuse(f"it ends before {what}")
        value: int = struct.unpack_from(f"<{code}", self.data, self.position)[0]
        self.position += size
        return value

    def _refuse(self, reason: str) -> NoReturn:
        raise ModelFilesError(f"{self.path} is not a usable GGUF file: {reason}")
