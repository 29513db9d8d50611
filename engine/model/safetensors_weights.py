"""Tensors of a Hugging Face directory: one or many safetensors files.

Owns the check of their headers, before anything in them is believed, and reading one tensor at a time. Never knows what
a model needs. Called by `engine.model.weights`. Source of the format: huggingface/safetensors, README "Format".
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model.arch import ArchConfig
from protocol.model_files import ModelFiles, ModelFilesError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_INDEX = "model.safetensors.index.json"
_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_READABLE = ("F64", "F32", "F16", "BF16")
# Buffers that old versions of transformers saved with the weights; they are recomputed.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".self_attn.bias", ".self_attn.masked_bias")


@dataclass(frozen=True)
class StoredTensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the data
    end: int


class SafetensorsSource:
    def __init__(self, files: ModelFiles, arch: ArchConfig) -> None:
        self._tied = arch.tied
        self._tensors = read_directory(files.path)
        self._prediction = _prediction_prefixes(self._tensors, arch.num_layers)
        self._handles: dict[Path, Any] = {}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.end - tensor.start for name, tensor in self._tensors.items() if not self._is_ignored(name))

    def shape(self, name: str) -> tuple[int, ...] | None:
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.shape

    def size(self, name: str) -> int:
        """Bytes in the file."""
        return self._tensors[name].end - self._tensors[name].start

    def file_name(self, name: str) -> str:
        return name

    def unknown(self, expected: Mapping[str, object]) -> list[str]:
        """Tensors that are neither expected nor known to be superfluous."""
        return [name for name in self._tensors if name not in expected and not self._is_ignored(name)]

    def rope_factors(self) -> torch.Tensor | None:
        return None

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (same shape, any float dtype and device)."""
        tensor = self._tensors[name]
        if tensor.dtype not in _READABLE:
            raise _refusal(
                tensor.file, f"tensor {name} is stored as {tensor.dtype}; {', '.join(_READABLE)} can be read"
            )
        try:
            if tensor.file not in self._handles:
                self._handles[tensor.file] = safe_open(str(tensor.file), framework="pt")
            target.copy_(self._handles[tensor.file].get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise _refusal(tensor.file, str(error)) from error

    def _is_ignored(self, name: str) -> bool:
        is_prediction = name.startswith(self._prediction)
        return is_prediction or name.endswith(_IGNORED_SUFFIXES) or (self._tied and name == "lm_head.weight")


def _prediction_prefixes(tensors: Mapping[str, StoredTensor], num_layers: int) -> tuple[str, ...]:
    """What the names of multi-token prediction modules begin with: a drafter reads them, the model does not.

    Either `mtp.`, or layers behind the last one, which are recognised by the matrix that no decoder layer has.
    """
    layers: list[str] = []
    while f"model.layers.{num_layers + len(layers)}.eh_proj.weight" in tensors:
        layers.append(f"model.layers.{num_layers + len(layers)}.")
    return ("mtp.", *layers)


def read_directory(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of every weight file of the directory, by name."""
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(directory):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise _refusal(path, f"tensor {name} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    return tensors


def _weight_files(directory: Path) -> list[Path]:
    index = directory / _INDEX
    if index.is_file():
        return _indexed_files(index)
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise _refusal(directory, f"it holds {len(found)} safetensors files but no {_INDEX}")
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise _refusal(
            directory, "it holds pickled weights only, which can run code when read; convert them to safetensors"
        )
    raise _refusal(directory, "it holds no safetensors file")


def _indexed_files(index: Path) -> list[Path]:
    content = _json_object(index, index.read_bytes())
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _refusal(index, "weight_map is missing, empty or no object")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        # A bare file name: an index must not reach outside its directory.
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _refusal(index, f"weight_map names {name!r:.80}, which is no safetensors file of this directory")
        if not (index.parent / name).is_file():
            raise _refusal(index, f"weight_map names {name}, which is not there")
    return [index.parent / name for name in names]


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file. Raises `ModelFilesError` unless every byte is accounted for, as the format demands."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise _refusal(path, f"it has {size} bytes, too few for a header: it is truncated or damaged")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise _refusal(
                    path, f"it claims a header of {length} bytes in a file of {size}: it is truncated or damaged"
                )
            header = _json_object(path, file.read(length))
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror or error}") from error
    header.pop("__metadata__", None)
    tensors = {name: _parse_entry(path, name, entry) for name, entry in header.items()}
    _check_layout(path, tensors, size - 8 - length)
    return tensors


def _parse_entry(path: Path, name: str, entry: object) -> StoredTensor:
    if not isinstance(entry, dict):
        raise _refusal(path, f"the entry of tensor {name!r:.80} is no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES:
        raise _refusal(path, f"tensor {name!r:.80} has the unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or not all(_is_count(item) for item in shape):
        raise _refusal(path, f"tensor {name!r:.80} has the impossible shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(item) for item in offsets):
        raise _refusal(path, f"tensor {name!r:.80} has the impossible offsets {offsets!r:.80}")
    start, end = offsets
    if end - start != prod(shape) * _ITEM_BYTES[dtype]:
        raise _refusal(
            path, f"tensor {name!r:.80} of shape {shape!r:.80} and dtype {dtype} does not fit offsets {offsets}"
        )
    return StoredTensor(path, dtype, tuple(shape), start, end)


def _check_layout(path: Path, tensors: dict[str, StoredTensor], data_bytes: int) -> None:
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end))
    if not ordered:
        raise _refusal(path, "it holds no tensors")
    if ordered[0][1].start != 0:
        raise _refusal(path, f"tensor {ordered[0][0]!r:.80} does not begin where the data begins")
    for (name, before), (other, after) in pairwise(ordered):
        if before.end != after.start:
            raise _refusal(path, f"tensors {name!r:.80} and {other!r:.80} overlap or leave a gap")
    name, last = ordered[-1]
    if last.end != data_bytes:
        raise _refusal(
            path, f"tensor {name!r:.80} ends at byte {last.end} of {data_bytes} of data: it is truncated or damaged"
        )


def _json_object(path: Path, content: bytes) -> dict[str, object]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _refusal(path, "its JSON header cannot be parsed: it is truncated or damaged") from error
    if not isinstance(value, dict):
        raise _refusal(path, f"its JSON header is a {type(value).__name__}, not an object")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _refusal(path: Path, reason: str) -> ModelFilesError:
    return ModelFilesError(f"{path} is not usable: {reason}")
