"""The drafters that come with the package, each made for a model that comes with a package.

Owns which drafter is for which model, and where its files are; never reads them. Called by the recipes of drafters that
have weights, where nobody gave --draft-model. What is here was made by `tools/train_drafter.py`, and docs/speculators.md
says with which result.
"""

from pathlib import Path

from protocol.model_files import EMBEDDED, ModelFiles, ModelFilesError, resolve

_HERE = Path(__file__).parent / "shipped_drafters"
_FOR_THE_EMBEDDED_MODEL = {"eagle3": _HERE / "smollm2-135m-instruct-eagle3"}


def shipped_drafter(speculator: str, target: ModelFiles | None) -> ModelFiles | None:
    """The drafter that comes with `target`; None where there is none. Raises `ModelFilesError` for files that are gone."""
    directory = _FOR_THE_EMBEDDED_MODEL.get(speculator)
    if directory is None or target is None or not _is_embedded(target):
        return None
    return resolve(str(directory))


def comes_with(speculator: str) -> str:
    """The end of a sentence that asks for --draft-model: with which model it can be left out. Empty: with none."""
    return f"; only --model {EMBEDDED} comes with one" if speculator in _FOR_THE_EMBEDDED_MODEL else ""


def _is_embedded(target: ModelFiles) -> bool:
    try:
        embedded = resolve(EMBEDDED)
    except ModelFilesError:  # its package is not installed: the target is another
        return False
    return target.path.resolve() == embedded.path.resolve()
