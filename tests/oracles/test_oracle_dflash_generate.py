"""Whole texts against z-lab's own `dflash_generate` (PyPI `dflash` 0.1.0): its loop, its caches, its rejection sampling.

Both sides read the same files; theirs runs the target with transformers. Greedy texts must be the same with the same rounds.
For sampled ones their draws and verdicts get the very numbers ours get, each by its position and purpose, so that texts
and rounds must be the same again: nothing about the law of either is left to statistics. What of `dflash` cannot run here:
its timing, which waits for CUDA (`return_stats` only; replaced), and its MLX half.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.speculation.recipe import BlockOverrides, SpeculationSettings
from tests.fakes import submit
from tests.inprocess import Drafter, InProcessEngine, Shape
from tests.oracles.vllm_rounds import write_target
from tests.oracles.zlab_blocks import their_model
from tests.tiny_blocks import PublishedBlock, write_block
from tests.tiny_drafters import FAVOURED_TOKEN_IDS, target_model

dflash = pytest.importorskip("dflash.model")

NUM_LAYERS = 3
NUM_TOKENS = 40
PROMPTS = ([5, 6, 7, 8] * 4, [100], [9, 70, 31, 250, 12, 12], [44, 45] * 9)
FITTED = PublishedBlock("z-lab", num_layers=1, sliding=(False,))
BLOCKS = {
    "plain": FITTED,
    "windows": replace(FITTED, sliding=(True,), window=9),
    "open-windows": replace(FITTED, sliding=(True,), window=9, says_causal=False),
    "last-state": replace(FITTED, taps=(1, NUM_LAYERS)),  # transformers gives it behind the final norm
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "cold": {"temperature": 0.5},
    "nucleus": {"temperature": 0.9, "top_p": 0.8},
    "top_k": {"temperature": 1.2, "top_k": 20},
    "both": {"temperature": 1.0, "top_p": 0.9, "top_k": 30},
}


@contextmanager
def stored(directory: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The weights of the one file there, to be changed."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    yield weights
    save_file(weights, str(path), metadata={"format": "pt"})


@dataclass(frozen=True)
class Text:
    token_ids: list[int]  # behind the prompt
    rounds: list[int]  # tokens each gave


class Pair:
    """One target and one drafter, in files, in their classes and in an engine of ours."""

    def __init__(self, root: Path, name: str) -> None:
        published = BLOCKS[name]
        self.target = write_target(root / "target", strength=0.5, num_layers=NUM_LAYERS)
        with stored(self.target) as weights:  # a target that says some tokens often is guessed right more often
            weights["lm_head.weight"][list(FAVOURED_TOKEN_IDS)] *= 3.0
        self.drafter = write_block(root / "drafter", self.target, published, favour=1.0)
        with stored(self.drafter) as weights:
            del weights["lm_head.weight"]  # it is the target's own, the only one theirs has
        self.model = their_model(published, target_model(self.target).arch, self.drafter)
        self.model.block_size = published.block_size
        self.theirs = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.float32).eval()
        self._reads_normed = NUM_LAYERS in published.taps

    def engine(self, is_sampled: bool) -> InProcessEngine:
        settings = SpeculationSettings(
            draft_model=str(self.drafter),
            draft_sampling="sampled" if is_sampled else "greedy",
            block=BlockOverrides(final_norm=True if self._reads_normed else None),
        )
        return InProcessEngine(self.target, Shape(), Drafter("dflash", "dflash", settings))


class OurNumbers:
    """Their sources of chance, answering with the numbers that our engine uses for the same decision of the same text."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, num_prompt_tokens: int) -> None:
        self._seed = torch.tensor([seed])
        self._first = num_prompt_tokens  # position of the token behind the prompt
        self._root = num_prompt_tokens - 1  # position of the last committed token
        self._final = num_prompt_tokens  # position of the target's own token that is drawn next
        self._inner = dflash._rejection_sample
        monkeypatch.setattr(dflash, "_sample_probs", self._draw)
        monkeypatch.setattr(dflash, "_rejection_sample", self._reject)
        monkeypatch.setattr(torch, "rand_like", self._verdicts)

    def _draw(self, probs: torch.Tensor) -> torch.Tensor:
        """[1, V] is the target's own token; [1, k, V] a draft, or the token behind the prompt."""
        flat = probs.reshape(-1, probs.shape[-1])
        if probs.dim() == 2 or self._root < self._first:
            tokens = self._at(flat, Purpose.SAMPLE, self._final)
            if probs.dim() == 3:
                self._commit(1)
        else:
            tokens = self._at(flat, Purpose.DRAFT, self._root + 1)
        return tokens.view(probs.shape[:-1])

    def _at(self, probs: torch.Tensor, purpose: Purpose, first: int) -> torch.Tensor:
        return draw(probs.double(), uniforms(self._seed, torch.arange(first, first + len(probs)), purpose))

    def _verdicts(self, like: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(self._root + 1, self._root + 1 + like.shape[1])
        return uniforms(self._seed, positions, Purpose.ACCEPT)[None]

    def _reject(self, *arguments: Any) -> tuple[int, torch.Tensor]:
        """Once to learn how many stay, which says where the token behind them is; and once with its number."""
        accepted, _ = self._inner(*arguments)
        self._final = self._root + 1 + accepted
        verdict = self._inner(*arguments)
        self._commit(accepted + 1)
        return verdict

    def _commit(self, count: int) -> None:
        self._root += count
        self._final = self._root + 1


def their_text(pair: Pair, prompt: Sequence[int], sampling: dict[str, Any]) -> Text:
    result = dflash.dflash_generate(
        pair.model, pair.theirs, torch.tensor([list(prompt)]), NUM_TOKENS, None, return_stats=True, **sampling
    )
    return Text(result.output_ids[0, len(prompt) :].tolist(), result.acceptance_lengths)


def our_text(engine: InProcessEngine, number: int, prompt: Sequence[int], sampling: dict[str, Any]) -> Text:
    engine.submit(submit(number, prompt, max_tokens=NUM_TOKENS, ignore_eos=True, seed=number, **sampling))
    engine.run_dry()
    outputs = engine.outputs()[number, 0]
    rounds = [one.round.accepted + one.round.non_draft - one.round.cut for one in outputs if one.round is not None]
    return Text(list(engine.answers()[number, 0].token_ids), rounds)


def without_end(text: Text, num_tokens: int) -> Text:
    """Up to where the length bounds no draft: the last rounds draft less with us, who never draft what cannot be kept."""
    count = 1  # the token behind the prompt
    rounds = []
    for one in text.rounds:
        if count + num_tokens > NUM_TOKENS:
            break
        rounds.append(one)
        count += one
    return Text(text.token_ids[:count], rounds)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    return functools.cache(lambda name: Pair(tmp_path_factory.mktemp(name), name))


@pytest.mark.parametrize("how", SAMPLING)
@pytest.mark.parametrize("name", BLOCKS)
def test_texts_and_rounds_are_those_of_dflash_generate(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    monkeypatch.setattr(dflash, "_cuda_time", time.perf_counter)
    pair, sampling = pair_of(name), SAMPLING[how]
    engine = pair.engine(is_sampled=how != "greedy")
    rounds = []
    for number, prompt in enumerate(PROMPTS, start=1):
        ours = our_text(engine, number, prompt, sampling)
        with monkeypatch.context() as patch:
            if how != "greedy":
                OurNumbers(patch, number, len(prompt))
            theirs = their_text(pair, prompt, sampling)
        if how == "greedy":
            assert ours.token_ids == theirs.token_ids
        assert without_end(ours, pair.model.block_size) == without_end(theirs, pair.model.block_size)
        rounds += without_end(ours, pair.model.block_size).rounds
    assert len(rounds) > 15 and len(set(rounds)) > 1, f"rounds that all end alike would prove little: {rounds}"
