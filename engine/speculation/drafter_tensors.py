"""The tensors of a drafter's own files, safetensors or pickled, under the names that drafters use here.

Owns finding, naming and reading them; never knows what a drafter needs. A name loses a leading `model.`, and `midlayer.`
reads `layers.0.`: publishers differ in that alone. Pickled files are read with torch's weights-only reader, which builds
tensors and nothing else. Called by the recipes of drafters with weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model.safetensors_weights import StoredTensor, read_directory
from protocol.model_files import ModelFilesError

_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")  # by any publisher; the first that is there
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "model."
_MIDDLE, _LAYER = "midlayer.", "layers.0."  # SafeAILab's name of the one layer, and everybody else's
_BUFFERS = ("rotary_emb.inv_freq",)  # what some versions save with the weights and everybody recomputes


@dataclass(frozen=True)
class _Found:
    """One tensor: where it is, or the tensor itself when its file was pickled."""

    file: Path
    file_name: str  # in the file
    shape: tuple[int, ...]
    tensor: torch.Tensor | None = None


class DrafterTensors:
    """Raises `ModelFilesError` naming file and tensor for whatever cannot be used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._found: dict[str, _Found] = {}
        pickled = _pickled_file(directory)
        for found in _stored(directory) if pickled is None else _pickled(pickled):
            name = _here(found.file_name)
            if name.endswith(_BUFFERS):
                continue
            if name in self._found:
                raise self.refusal(f"the tensors {self._found[name].file_name} and {found.file_name} are the same one")
            self._found[name] = found
        self._handles: dict[Path, Any] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def refusal(self, reason: str) -> ModelFilesError:
        return ModelFilesError(f"{self.directory}: {reason}")

    def shape(self, name: str) -> tuple[int, ...] | None:
        found = self._found.get(name)
        return None if found is None else found.shape

    def matching(self, prefix: str) -> list[str]:
        """Names that begin with `prefix`, in order."""
        return sorted(name for name in self._found if name.startswith(prefix))

    def spelling(self, name: str) -> str:
        """`name` as the files write it; as they would, where it is missing: as the names with the same beginning are."""
        found = self._found.get(name)
        if found is not None:
            return found.file_name
        beginning = name.partition(".")[0] + "."
        written = next((one.file_name for here, one in self._found.items() if here.startswith(beginning)), name)
        if written.removeprefix(_PREFIX).startswith(_MIDDLE) and name.startswith(_LAYER):
            name = _MIDDLE + name.removeprefix(_LAYER)
        return _PREFIX + name if written.startswith(_PREFIX) else name

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: frozenset[str], kind: str) -> None:
        """Refuse missing, misshapen and unknown tensors. `kind` names what they should be part of."""
        for name, shape in expected.items():
            found = self._found.get(name)
            if found is None:
                raise self.refusal(f"the tensor {self.spelling(name)} is missing")
            if found.shape != shape:
                raise self.refusal(
                    f"the tensor {found.file_name} has shape {found.shape}; target and config.json say {shape}"
                )
        for name, found in self._found.items():
            if name not in expected and name not in ignored:
                raise self.refusal(f"the tensor {found.file_name} is not part of {kind}")

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored, on the CPU."""
        found = self._found[name]
        if found.tensor is not None:
            return found.tensor
        try:
            if found.file not in self._handles:
                self._handles[found.file] = safe_open(str(found.file), framework="pt")
            tensor: torch.Tensor = self._handles[found.file].get_tensor(found.file_name)
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"{found.file} is not usable: {error}") from error
        return tensor

    def copy(self, name: str, target: torch.Tensor) -> None:
        """Fill `target` (same shape, any float dtype and device)."""
        tensor = self.read(name)
        if tensor.dtype not in _FLOATS:
            raise self.refusal(
                f"the tensor {self.spelling(name)} is stored as {tensor.dtype}; floating-point weights can be read"
            )
        target.copy_(tensor)


def _here(file_name: str) -> str:
    name = file_name.removeprefix(_PREFIX)
    return _LAYER + name.removeprefix(_MIDDLE) if name.startswith(_MIDDLE) else name


def _pickled_file(directory: Path) -> Path | None:
    """The pickled file to read; None where there are safetensors, which are preferred, or nothing at all."""
    if any(directory.glob("*.safetensors")):
        return None
    return next((directory / name for name in _PICKLED if (directory / name).is_file()), None)


def _stored(directory: Path) -> Iterator[_Found]:
    tensors: Mapping[str, StoredTensor] = read_directory(directory)
    for name, tensor in tensors.items():
        yield _Found(tensor.file, name, tensor.shape)


def _pickled(path: Path) -> Iterator[_Found]:
    try:
        # Mapped, so that looking at the shapes reads nothing else.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # bytes from elsewhere: the reader's errors have no common class
        reason = str(error).split("\n", 1)[0][:200]
        raise ModelFilesError(
            f"{path} cannot be read as plain weights ({reason}): convert it to safetensors"
        ) from error
    if not isinstance(content, dict):
        raise ModelFilesError(
            f"{path} holds a {type(content).__name__}, not tensors by name: convert it to safetensors"
        )
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ModelFilesError(f"{path} holds {name!r:.60}, which is no tensor: convert it to safetensors")
        yield _Found(path, name, tuple(tensor.shape), tensor)
