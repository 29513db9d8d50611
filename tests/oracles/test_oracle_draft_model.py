"""A draft model against transformers' assisted generation: the same tokens drafted in every round, and as many accepted."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="assisted generation is the oracle")

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.generation.candidate_generator import AssistedCandidateGenerator  # noqa: E402

from tests.speculation.draft_rows import BLOCK_SIZE, Drafted, Row, load, random_prompt  # noqa: E402
from tests.tiny import Family, write_noisy_copy, write_tiny_model  # noqa: E402

NUM_TOKENS, WIDTH = 30, 4


@dataclass
class Rounds:
    """What each round drafted, and how many of it the target kept."""

    drafted: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def reference(path: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


def assisted(
    target: torch.nn.Module, assistant: torch.nn.Module, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], Rounds]:
    """Their text and rounds, with a fixed draft length and no confidence rule."""
    rounds = Rounds()
    get, update = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy

    def get_candidates(self, input_ids, *arguments, **options):
        candidates = get(self, input_ids, *arguments, **options)
        rounds.drafted.append(candidates[0][0, input_ids.shape[1] :].tolist())
        return candidates

    def update_candidate_strategy(self, input_ids, scores, num_matches):
        rounds.accepted.append(int(num_matches))
        return update(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", get_candidates)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", update_candidate_strategy)
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = WIDTH, "constant"
    settings.assistant_confidence_threshold = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = target.generate(
            torch.tensor([prompt]), assistant_model=assistant, do_sample=False, max_new_tokens=NUM_TOKENS
        )
    return output[0, len(prompt) :].tolist(), rounds


def ours(draft: Path, target: torch.nn.Module, prompt: list[int]) -> tuple[list[int], Rounds]:
    """Our drafter; the target's choices are argmax over its whole text, by transformers' model. The prompt's end is the root."""
    drafted, rounds = Drafted(load(draft), WIDTH), Rounds()
    row = Row(0, prompt[:-1])
    row.block_ids = tuple(range((len(prompt) + NUM_TOKENS + WIDTH) // BLOCK_SIZE + 1))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(prompt[-1])])
    while (left := NUM_TOKENS - (len(row.history) - len(prompt))) > 0:
        tokens: list[int] = []
        if left > 1:
            answer = drafted.speculator.propose([row.asks(min(WIDTH, left - 1))])
            tokens = answer.tokens[0, : int(answer.lengths[0])].tolist()
        with torch.inference_mode():
            logits = target(torch.tensor([[*row.history, *tokens]])).logits[0]
        choices = logits[len(row.history) - 1 :].argmax(dim=1).tolist()
        kept = next((step for step, token in enumerate(tokens) if token != choices[step]), len(tokens))
        rounds.drafted.append(tokens)
        rounds.accepted.append(kept)
        drafted.speculator.observe([row.commit(tokens[:kept], choices[kept])])
    return row.history[len(prompt) :], rounds


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rounds_are_those_of_assisted_generation(
    family: Family, noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_path = write_tiny_model(tmp_path / "target", family, seed=7)
    draft_path = write_noisy_copy(tmp_path / "draft", target_path, noise)
    target, assistant = reference(target_path), reference(draft_path)
    num_drafted = num_accepted = 0
    for seed in range(4):
        prompt = random_prompt(seed, 5 + 7 * seed)
        their_text, theirs = assisted(target, assistant, prompt, monkeypatch)
        our_text, rounds = ours(draft_path, target, prompt)
        monkeypatch.undo()
        assert our_text == their_text
        assert rounds.drafted == theirs.drafted
        assert rounds.accepted == theirs.accepted
        num_drafted += sum(map(len, rounds.drafted))
        num_accepted += sum(rounds.accepted)
    assert num_accepted == num_drafted if noise == 0 else 0 < num_accepted < num_drafted
