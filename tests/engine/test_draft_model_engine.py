"""A draft model behind the whole engine: a model that is the target in all but name never drafts a wrong token.

Its keys must then be right whatever happened before: chunks, prefix hits, preemption, other rows, other tokenizers.
"""

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.construction import ExecutorSettings, build_executor
from engine.speculation.draft_model import DraftModelSpeculator
from engine.speculation.recipe import SpeculationSettings
from protocol.counters import Counters
from protocol.model_files import ModelFilesError, resolve
from tests.inprocess import Drafter, InProcessEngine, Shape
from tests.lossless import SCENARIOS, Plain, Scenario, play, request, traffic
from tests.tiny import SPECIAL_TOKENS, write_tiny_model

MODEL_SEED = 5


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "model", seed=MODEL_SEED)


@pytest.fixture(scope="module")
def plain(target: Path) -> Plain:
    return Plain(target)


def drafter(draft_model: Path, **settings: object) -> Drafter:
    return Drafter("draft_model", "draft_model", SpeculationSettings(draft_model=str(draft_model), **settings))


def settings(draft_model: Path | str | None, **more: object) -> ExecutorSettings:
    speculation = SpeculationSettings(draft_model=None if draft_model is None else str(draft_model), **more)
    return ExecutorSettings(dtype="fp32", kv_cache_tokens=512, speculator="draft_model", speculation=speculation)


def unadorned(scenario: Scenario, temperature: float = 0.0) -> Scenario:
    """The same traffic without bans and penalties, which no drafter can foresee."""

    def bare(one):
        sampling = request(0, [1], {"max_tokens": one.sampling.max_tokens, "temperature": temperature}).sampling
        return msgspec.structs.replace(one, sampling=msgspec.structs.replace(sampling, seed=one.request_id))

    return replace(scenario, waves=tuple(tuple(map(bare, wave)) for wave in scenario.waves))


def played(target: Path, scenario: Scenario, drafts: Drafter) -> Counters:
    engine = InProcessEngine(target, scenario.shape, drafts)
    play(engine, scenario)
    assert engine.counters.steps_failed == 0
    return engine.counters


# ---- the target under another name ----


@pytest.mark.parametrize("name", ["chunked", "cached", "preempted", "cramped", "several"])
def test_the_target_itself_is_never_wrong(target: Path, plain: Plain, name: str) -> None:
    """A key that is missing or another token's would cost acceptance, and here nothing else does."""
    scenario = unadorned(SCENARIOS[name](plain))
    counters = played(target, scenario, drafter(_copy(target, "twin")))
    assert counters.draft_tokens > 150
    assert counters.accepted_tokens == counters.draft_tokens
    for rises in scenario.must_rise:
        assert getattr(counters, rises) > 0


def test_draws_of_the_target_itself_stay(target: Path, plain: Plain) -> None:
    """Sampled drafts are drawn from the very distribution they are judged by."""
    scenario = unadorned(SCENARIOS["cached"](plain), temperature=0.9)
    counters = played(target, scenario, drafter(target, draft_sampling="sampled"))
    assert counters.accepted_tokens == counters.draft_tokens > 300


def test_greedy_drafts_of_sampled_requests_are_often_wrong(target: Path, plain: Plain) -> None:
    """What the two above would look like if anything passed."""
    scenario = unadorned(SCENARIOS["cached"](plain), temperature=0.9)
    counters = played(target, scenario, drafter(target))
    assert 0 < counters.accepted_tokens < 0.9 * counters.draft_tokens


def _copy(model: Path, name: str) -> Path:
    """The same files elsewhere, so that they are loaded as another model's."""
    directory = model.with_name(name)
    if not directory.exists():
        directory.mkdir()
        for path in model.iterdir():
            (directory / path.name).write_bytes(path.read_bytes())
    return directory


# ---- other tokenizers ----


def renumbered(model: Path, directory: Path, num_missing: int) -> Path:
    """The model over shuffled token ids, without its last `num_missing` merges, spelled with a mark for the space."""
    directory.mkdir()
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    by_id = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])[: config["vocab_size"] - num_missing]
    order = list(range(len(by_id)))
    random.Random(1).shuffle(order)  # order[new] = old
    added = [{"id": order.index(index), "content": token} for index, token in enumerate(SPECIAL_TOKENS)]
    vocab = {by_id[old][0]: new for new, old in enumerate(order)}
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocab}}))
    config |= {"vocab_size": len(order), "eos_token_id": order.index(config["eos_token_id"])}
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][order].clone()
    save_file(weights, str(directory / "model.safetensors"))
    return directory


def test_a_target_with_renumbered_tokens_is_never_wrong(target: Path, plain: Plain, tmp_path: Path) -> None:
    scenario = unadorned(SCENARIOS["cached"](plain))
    counters = played(target, scenario, drafter(renumbered(target, tmp_path / "other", 0)))
    assert counters.accepted_tokens == counters.draft_tokens > 300
    sampled = unadorned(SCENARIOS["mixed"](plain), temperature=0.8)
    drawn = played(target, sampled, drafter(renumbered(target, tmp_path / "drawn", 0), draft_sampling="sampled"))
    assert drawn.accepted_tokens == drawn.draft_tokens > 100


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_a_smaller_vocabulary_drafts_what_it_has(target: Path, plain: Plain, tmp_path: Path, sampling: str) -> None:
    scenario = unadorned(SCENARIOS["mixed"](plain))
    small = drafter(renumbered(target, tmp_path / "small", 40), draft_sampling=sampling)
    engine = InProcessEngine(target, scenario.shape, small)
    play(engine, scenario)
    for one in scenario.submits:
        assert engine.answers()[one.request_id, 0].token_ids == plain.answer(one).token_ids
    assert 0 < engine.counters.accepted_tokens < engine.counters.draft_tokens


@pytest.mark.parametrize(("target_size", "draft_size"), [(448, 384), (384, 448)])
def test_padded_vocabularies_are_one(tmp_path: Path, target_size: int, draft_size: int) -> None:
    """Prompts and answers may hold ids that only the larger model has: they are read as the end of a text."""
    target = write_tiny_model(tmp_path / "target", seed=1, vocab_size=target_size)
    draft = write_tiny_model(tmp_path / "draft", "qwen2", seed=2, vocab_size=draft_size)
    alone = Plain(target)
    submits = tuple(request(number, [370 + number, target_size - 1, 9], {"temperature": 0.0}) for number in range(1, 6))
    scenario = Scenario(Shape(), (submits,))
    engine = InProcessEngine(target, scenario.shape, drafter(draft, draft_sampling="sampled"))
    play(engine, scenario)
    assert engine.counters.draft_tokens > 50
    for one in submits:
        assert engine.answers()[one.request_id, 0].token_ids == alone.answer(one).token_ids


# ---- limits and refusals ----


def test_rows_beyond_the_draft_models_context_decode_plainly(
    target: Path, plain: Plain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = write_tiny_model(tmp_path / "short", seed=MODEL_SEED, context_length=24)
    submits = tuple(
        request(one.request_id, one.prompt_token_ids, {"temperature": 0.0, "ignore_eos": True, "max_tokens": 30})
        for one in traffic(3, count=3, longest=12)
    )
    with caplog.at_level(logging.INFO):
        engine = InProcessEngine(target, Shape(), drafter(short))
    assert "made for shorter texts: sequences longer than that run without drafts" in caplog.text
    assert "speculator=draft_model context=24 max_model_len=512" in caplog.text
    play(engine, Scenario(Shape(), (submits,)))
    for one in submits:
        assert engine.answers()[one.request_id, 0].token_ids == plain.answer(one).token_ids
    assert 0 < engine.counters.accepted_tokens == engine.counters.draft_tokens  # equal weights, and equal positions
    assert engine.counters.plain_rounds > 30


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "--speculator draft_model needs --draft-model"),
        ({"draft_model": "x", "draft_sampling": "warm"}, "--draft-sampling must be one of greedy, sampled, got 'warm'"),
        ({"draft_model": "x", "num_draft_tokens": 65}, "--num-draft-tokens must be between 1 and 64"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(target: Path, more: dict[str, object], words: str) -> None:
    path = more.pop("draft_model", None)
    with pytest.raises(ValueError, match=words):
        build_executor(resolve(str(target)), settings(path and target, **more))


def test_files_that_cannot_work_are_refused_before_weights_are_loaded(target: Path, tmp_path: Path) -> None:
    loaded: list[int] = []
    for path, words in (("no/such/place", "no/such/place"), (_gpt2(tmp_path), "model_type 'gpt2' is not supported")):
        with pytest.raises(ModelFilesError, match=words):
            build_executor(resolve(str(target)), settings(path), lambda done, total: loaded.append(done))
    assert loaded == []


def _gpt2(directory: Path) -> Path:
    (directory / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "vocab_size": 320, "max_position_embeddings": 64})
    )
    return directory


def test_what_a_draft_model_takes_is_counted(target: Path, tmp_path: Path) -> None:
    draft = write_tiny_model(tmp_path / "draft", "qwen3", num_layers=1, seed=9, tied=True)
    built = build_executor(resolve(str(target)), settings(draft))
    speculator = built.executor._speculator
    assert isinstance(speculator, DraftModelSpeculator)
    alone = build_executor(resolve(str(target)), ExecutorSettings(dtype="fp32", kv_cache_tokens=512))
    assert built.weight_bytes - alone.weight_bytes == speculator._model.weights.num_bytes
    pool = speculator._pool
    assert built.kv_bytes - alone.kv_bytes == pool.keys.nbytes + pool.values.nbytes
    itself = build_executor(resolve(str(target)), settings(target))
    assert itself.weight_bytes == alone.weight_bytes  # one set of weights serves as both


def test_what_is_kept_of_draws_is_left_free(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn from: float32 [rows, drafts, vocabulary], and a copy, beside what every verify row takes."""
    reserved: list[int] = []

    def note(device: torch.device, token: int, wanted: int, most: int, step_bytes: int, share: float) -> int:
        reserved.append(step_bytes)
        return 512

    monkeypatch.setattr("engine.construction.default_kv_tokens", note)
    for sampling in ("greedy", "sampled"):
        build_executor(resolve(str(target)), replace(settings(target, draft_sampling=sampling), kv_cache_tokens=None))
    rows, vocab_size = ExecutorSettings().max_num_seqs, 320
    assert reserved[1] - reserved[0] == 2 * 4 * rows * (1 + 4) * vocab_size


def test_drafts_take_their_default_length(target: Path) -> None:
    capabilities = build_executor(resolve(str(target)), settings(target)).capabilities
    assert (capabilities.max_draft_len, capabilities.sources, capabilities.gives_probs) == (4, ("draft_model",), False)
    assert not capabilities.drafts_on_host and capabilities.lookahead == 0
