"""Every option of drafting, given to every drafter of the registry: it changes what is drafted, or is refused by name.

Options are those of `SpeculationSettings` and drafters those of the registry, so a new one of either is held to this by
existing. Options go in as a user gives them, as flags; what comes out are the drafts of an engine over a tiny model.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.assembly import _speculation
from engine.config import EngineConfig
from engine.speculation.draft import Draft
from engine.speculation.names import PREDICTION
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.registry import names
from engine.speculation.speculator import DraftRow
from protocol.messages import Submit
from protocol.options import parse, table
from protocol.sampling import SamplingParams
from tests.draft_files import draft_files, has_files
from tests.inprocess import Drafter, InProcessEngine, Shape
from tests.lossless import request
from tests.tiny import write_noisy_copy, write_tiny_model
from tests.tiny_blocks import FITTED_DFLASH, FITTED_DSPARK, write_block
from tests.tiny_drafters import FITTED_EAGLE, Published, write_eagle
from tests.tiny_frozen_kv import write_frozen_kv
from tests.tiny_medusa import PublishedMedusa, write_medusa
from tests.tiny_mtp import DEEPSEEK, write_mtp
from tests.tiny_uno import write_uno

# Another value than the default, by option; where one value does not fit all drafters, by drafter.
VALUES: dict[str, str | dict[str, str]] = {
    "num_draft_tokens": "2",
    "lookup_min": "4",
    "lookup_max": "1",
    "draft_model": "OTHER",  # other weights in the same layout
    "draft_sampling": "sampled",
    "tree_top_k": "3",
    "tree_depth": "2",
    "suffix_max_depth": "3",
    "suffix_max_cached_requests": "0",
    "suffix_max_cached_tokens": "3",
    "suffix_factor": "0.4",
    "suffix_min_probability": "0.9",
    "suffix_mode": "tree",
    "suffix_share": "true",
    "eagle_taps": {"eagle": "1", "eagle3": "2,1"},
    "eagle_final_norm": {"eagle": "false", "eagle3": "true"},
    "eagle_norm_before_residual": "true",
    "eagle_norm_output": "true",
    "eagle_feature_norm": "none",
    "eagle_vocabulary_map": "ids",
    "mtp_zero_centred": "true",
    "synthetic_acceptance": "1,1,1,1,1",
    "block_taps": "2,1",
    "block_final_norm": "true",
    "block_anchor": "drop",
    "block_causal": "all",
    "confidence_threshold": "0.95",
}
BESIDE = {"tree_depth": ("--tree-top-k", "3"), "lookup_max": ("--lookup-min", "1")}  # without which they say nothing
ALPHABET = tuple(range(40, 46))  # so small that text repeats and one token is often followed by several


def option_names() -> list[str]:
    """Every setting of a drafter, under the name of its option."""
    found = []
    for field in fields(SpeculationSettings):
        if is_dataclass(field.default):
            found += [f"{field.name}_{inner.name}" for inner in fields(field.default)]
        else:
            found.append(field.name)
    return found


class Bench:
    """A tiny target, two sets of weights for every drafter that has some, and what is drafted."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._target = write_tiny_model(root / "target", "llama", seed=5)

    @cache  # noqa: B019  # lives as long as the module's tests
    def weights(self, name: str, seed: int) -> Path:
        directory = self._root / f"{name}-{seed}"
        match name:
            case "draft_model":
                return write_noisy_copy(directory, self._target, noise=0.5, seed=seed)
            case "eagle":
                return write_eagle(directory, self._target, FITTED_EAGLE, seed=seed)
            case "eagle3":
                published = Published("safeailab", draft_vocab_size=100, feature_norm="joint")
                return _two_readings(write_eagle(directory, self._target, published, seed=seed))
            case "mtp":
                return write_mtp(directory, self._target, DEEPSEEK, seed=seed)
            case "dflash" | "dspark":
                block = FITTED_DFLASH if name == "dflash" else FITTED_DSPARK
                return write_block(directory, self._target, block, seed=seed)
            case "medusa":
                return write_medusa(directory, self._target, PublishedMedusa(), seed=seed)
            case "frozen_kv_mtp":
                return write_frozen_kv(directory, self._target, seed=seed)
            case "uno":
                return write_uno(directory, self._target, seed=seed)
            case _:
                found = draft_files(name, directory, self._target)
                assert found is not None
                return found if seed == 1 else write_noisy_copy(directory, self.weights(name, 1), noise=0.5, seed=seed)

    @cache  # noqa: B019
    def drafts(self, name: str, arguments: tuple[str, ...]) -> tuple[object, ...]:
        """Everything proposed for the same requests. Raises ValueError as a start-up does."""
        other = str(self.weights(name, 2)) if "OTHER" in arguments and has_files(name) else "/no/such"
        arguments = tuple(other if word == "OTHER" else word for word in arguments)
        if has_files(name) and "--draft-model" not in arguments:
            arguments = ("--draft-model", str(self.weights(name, 1)), *arguments)
        config = parse(EngineConfig, ("--speculator", name, *arguments), {}, program="drafthouse engine")
        engine = InProcessEngine(self._target, Shape(), Drafter(name, name, _speculation(config)))
        seen: list[object] = []
        _listen(engine, seen)
        for submit in _requests():
            # An engine that drafts from no predictions refuses them.
            takes = PREDICTION in engine.capabilities.sources
            submit = _served(submit, engine.capabilities.unsupported_sampling)
            engine.submit(submit if takes else msgspec.structs.replace(submit, prediction_token_ids=()))
            engine.run_dry(checks=False)
        return tuple(seen)


def _two_readings(directory: Path) -> Path:
    """A vocabulary map that is one as offsets and as ids."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    weights["d2t"] = torch.arange(len(weights["d2t"]))
    del weights["t2d"]
    save_file(weights, str(path), metadata={"format": "pt"})
    return directory


def _requests() -> list[Submit]:
    """The same question twice by one client, then by another; each expects an answer that comes out otherwise."""
    generator = random.Random(4)
    prompt, expected = generator.choices(ALPHABET, k=12), tuple(generator.choices(ALPHABET, k=14))
    sampling = {"temperature": 0.9, "allowed_token_ids": ALPHABET, "ignore_eos": True, "max_tokens": 14, "seed": 3}
    return [
        msgspec.structs.replace(request(number, prompt, sampling), scope=scope, prediction_token_ids=expected)
        for number, scope in enumerate(("one", "one", "two"), start=1)
    ]


def _served(submit: Submit, unsupported: frozenset[str]) -> Submit:
    """Without the parameters for which the drafter drafts nothing."""
    defaults = {name: getattr(SamplingParams(max_tokens=1), name) for name in unsupported}
    return msgspec.structs.replace(submit, sampling=msgspec.structs.replace(submit.sampling, **defaults))


def _listen(engine: InProcessEngine, seen: list[object]) -> None:
    speculator: Any = engine.executor._inner._speculator  # type: ignore[attr-defined]
    propose = speculator.propose

    def listening(rows: Sequence[DraftRow]) -> Draft:
        draft: Draft = propose(rows)
        for row, length in enumerate(draft.lengths.tolist()):
            parents = None if draft.parents is None else tuple(draft.parents[row, :length].tolist())
            seen.append((tuple(draft.tokens[row, :length].tolist()), parents, draft.probs is not None))
        return draft

    speculator.propose = listening


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Bench(tmp_path_factory.mktemp("options"))
    torch.set_num_threads(before)


@pytest.mark.parametrize("option", option_names())
def test_an_option_changes_what_is_drafted_or_is_refused_by_name(bench: Bench, option: str) -> None:
    assert option in VALUES, f"say here which value of --{option.replace('_', '-')} is not the default"
    flag, beside = f"--{option.replace('_', '-')}", BESIDE.get(option, ())
    obeyed = []
    for name in names():
        given = VALUES[option]
        value = given if isinstance(given, str) else given.get(name, next(iter(given.values())))
        try:
            changed = bench.drafts(name, (*beside, flag, value))
        except ValueError as error:
            first = flag if not beside or flag in str(error) else beside[0]
            assert first in str(error) and name in str(error).lower(), str(error)
            continue
        assert changed != bench.drafts(name, beside), f"{flag} {value} changes no draft of {name}"
        obeyed.append(name)
    assert obeyed, f"no drafter takes {flag} {value}"


def test_without_options_every_drafter_but_none_drafts(bench: Bench) -> None:
    drafting = [name for name in names() if any(tokens for tokens, *_ in bench.drafts(name, ()))]  # type: ignore[misc]
    assert drafting == [name for name in names() if name != "none"]


def test_every_setting_of_a_drafter_is_an_option_with_the_same_default(bench: Bench) -> None:
    assert set(option_names()) <= set(table(EngineConfig))
    given = _speculation(parse(EngineConfig, (), {}, program="drafthouse engine"))
    assert replace(given, draft_sampling=None, tree_top_k=None) == SpeculationSettings()


def test_norms_that_a_user_says_do_not_run_may_be_there(bench: Bench) -> None:
    """The weights of a norm before fc are in the files; the option is believed before them."""
    assert bench.drafts("eagle3", ("--eagle-feature-norm", "joint")) == bench.drafts("eagle3", ())
    with pytest.raises(ValueError, match=r"--eagle-feature-norm each: .* has no weights of such a norm"):
        bench.drafts("eagle3", ("--eagle-feature-norm", "each"))


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        (
            "eagle",
            ("--eagle-taps", "1", "--eagle-final-norm", "true"),
            "behind hidden state 2, and the drafter reads 1$",
        ),
        ("eagle3", ("--eagle-taps", "0,1", "--eagle-final-norm", "true"), "--eagle-final-norm says nothing"),
        ("suffix", ("--suffix-max-cached-requests", "0", "--suffix-share", "true"), "--suffix-share says nothing with"),
        (
            "suffix",
            ("--suffix-max-cached-requests", "0", "--suffix-max-cached-tokens", "9"),
            "--suffix-max-cached-tokens says nothing with --suffix-max-cached-requests 0",
        ),
        ("medusa", ("--draft-model", "/no/such"), "^--draft-model: model '/no/such' is neither a file"),
        ("mtp", ("--draft-model", "/no/such"), "^--draft-model: model '/no/such' is neither a file"),
        ("eagle3", ("--draft-model", "/no/such"), "^--draft-model: model '/no/such' is neither a file"),
        ("frozen_kv_mtp", ("--draft-model", "/no/such"), "^--draft-model: model '/no/such' is neither a file"),
        ("draft_model", ("--draft-model", "/no/such"), "^--draft-model: model '/no/such' is neither a file"),
    ],
)
def test_options_that_say_nothing_and_files_that_are_not_there_are_named(
    bench: Bench, name: str, arguments: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        bench.drafts(name, arguments)
