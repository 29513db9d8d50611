"""The keys of a block drafter's config.json, wherever its publisher put them.

Owns the lookup (in `dflash_config` first, then at the top, then among the decoder layers' keys) and the check of each
value's kind; never knows what a key means. What changes the arithmetic and is not computed here is refused by its key.
Called by `block_recipe` and `block_layout`.
"""

from collections.abc import Mapping
from pathlib import Path

from engine.speculation.drafter_tensors import DrafterTensors
from protocol.model_files import ModelFilesError

_NESTED = "dflash_config"
# Keys that change what a drafter computes, and the values with which they change nothing.
_REFUSED: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("attention_sink_bias", (None, False)),
    ("add_swa_attention_sink_bias", (None, False)),
    ("attention_value_scale", (None, 1, 1.0)),
    ("is_neox_style", (None, True)),
    ("use_aux_hidden_state", (None, True)),
    ("projector_type", (None, "dflash", "dspark")),
    ("conv_kernel_size", (None,)),
    ("selector_rank", (None,)),
)
_WHY = {"conv_kernel_size": " (DFlash2)", "selector_rank": " (DFlash2)"}


class BlockConfig:
    """Raises `ModelFilesError` naming file and key for whatever cannot be used."""

    def __init__(
        self, config: Mapping[str, object], layers: Mapping[str, object], tensors: DrafterTensors, directory: Path
    ) -> None:
        """`layers`: the part of config.json that describes the decoder layers, which may be all of it."""
        nested = config.get(_NESTED)
        if nested is not None and not isinstance(nested, Mapping):
            raise tensors.refusal(f"{_NESTED} of config.json must be an object, got {nested!r:.40}")
        self._places: tuple[Mapping[str, object], ...] = (nested or {}, config, layers)
        self._tensors = tensors
        self.directory = directory
        for key, harmless in _REFUSED:
            value = self._value(key)
            if value not in harmless:
                raise self.refusal(f"{key} of config.json is {value!r:.40}{_WHY.get(key, '')}, which is not supported")
        if (directory / "mask_embedding.pt").is_file():
            raise self.refusal("mask_embedding.pt, an embedding of the mask of its own, is not supported")

    def refusal(self, reason: str) -> ModelFilesError:
        return self._tensors.refusal(reason)

    def has(self, key: str) -> bool:
        return self._value(key) is not None

    def flag(self, key: str) -> bool | None:
        value = self._value(key)
        if value is not None and not isinstance(value, bool):
            raise self.refusal(f"{key} of config.json must be true or false, got {value!r:.40}")
        return value

    def number(self, key: str) -> float | None:
        """A positive number."""
        value = self._value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refusal(f"{key} of config.json must be a positive number, got {value!r:.40}")
        return float(value)

    def whole_number(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 31:
            raise self.refusal(f"{key} of config.json must be a whole number from {least} on, got {value!r:.40}")
        return value

    def whole_numbers(self, key: str) -> tuple[int, ...] | None:
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or not all(type(item) is int for item in value):
            raise self.refusal(f"{key} of config.json must be a list of whole numbers, got {value!r:.60}")
        return tuple(value)

    def names(self, key: str) -> tuple[str, ...] | None:
        value = self._value(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refusal(f"{key} of config.json must be a list of names, got {value!r:.60}")
        return tuple(value)

    def name(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.refusal(f"{key} of config.json must be one of {', '.join(choices)}, got {value!r:.40}")
        return value

    def _value(self, key: str) -> object:
        return next((place[key] for place in self._places if place.get(key) is not None), None)
