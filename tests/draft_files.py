"""Tiny checkpoints for the drafters that have weights, by the name that starts them.

Owns the table: a registered name without an entry fails every test that starts it. Used by `tests.inprocess`, so that a
drafter is given its files wherever a test builds an engine.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.tiny import write_noisy_copy
from tests.tiny_blocks import fitted_dflash, fitted_dspark
from tests.tiny_drafters import fitted_eagle, fitted_eagle3
from tests.tiny_frozen_kv import fitted_frozen_kv
from tests.tiny_medusa import fitted_medusa
from tests.tiny_mtp import fitted_mtp
from tests.tiny_uno import fitted_uno

Writer = Callable[[Path, Path], object]  # (where to write, the target's Hugging Face directory)

# None: the drafter has no weights.
_WRITERS: Mapping[str, Writer | None] = {
    "none": None,
    "ngram": None,
    "suffix": None,
    "prediction": None,
    "synthetic": None,
    "draft_model": write_noisy_copy,
    "eagle": fitted_eagle,
    "eagle3": fitted_eagle3,
    "mtp": fitted_mtp,
    "medusa": fitted_medusa,
    "dflash": fitted_dflash,
    "dspark": fitted_dspark,
    "frozen_kv_mtp": fitted_frozen_kv,
    "uno": fitted_uno,
}


def draft_files(name: str, directory: Path, target: Path) -> Path | None:
    """The files of the drafter `name` for the model in `target`, written to `directory` once; None where it has none."""
    assert name in _WRITERS, f"tests/draft_files.py does not say which files the drafter {name} needs"
    writer = _WRITERS[name]
    if writer is None:
        return None
    if not directory.exists():
        writer(directory, target)
    return directory


def has_files(name: str) -> bool:
    """Whether the drafter runs a model of its own, which a toy target cannot have."""
    assert name in _WRITERS, f"tests/draft_files.py does not say which files the drafter {name} needs"
    return _WRITERS[name] is not None
