"""EAGLE-1 against vLLM 0.32.0, whole: its engine, its EAGLE proposer, its paged attention; logits and drafted tokens.

Both sides read the same directories and follow the same text round by round, so that what is compared includes which
hidden state is read, whose position a pair has, and what a rejected draft leaves in the keys of either.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.speculation.eagle_drafter import EagleSpeculator
from engine.speculation.recipe import SpeculationSettings
from tests.oracles.following import Follower
from tests.oracles.vllm_rounds import HEAD_DIM, num_accepted, vllm_rounds, with_beginnings, write_target
from tests.speculation.eagle_harness import recipe_of
from tests.tiny_drafters import Published, write_eagle

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(600)  # a whole engine starts, which takes minutes of a busy machine

WIDTH, NUM_LAYERS = 5, 2
# Of the spread of a step's logits. Both sides compute in float32 and sum in other orders; what a step is off, the next
# reads: measured 8e-6 at the first and 2e-4 at the fifth of a random drafter, whose features grow with every step.
FIRST_TOLERANCE, TOLERANCE = 4e-5, 1e-3
PROMPTS = [[5, 6, 7, 8] * 4, [100], [9, 70, 31, 250, 12, 12]]
# vLLM's EAGLE-1 reads no bias of fc, and no head of the drafter's own.
FITTED = Published("eagle", taps=(NUM_LAYERS,), has_head=False)
OWN_EMBEDDING = Published("eagle", taps=(NUM_LAYERS,), has_head=False, has_embedding=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("eagle") / "target", strength=0.04)


def write_drafter(directory: Path, target: Path, published: Published, favour: float | None) -> Path:
    """config.json as yuhuili/EAGLE-* have it: the target's architecture, to whose name vLLM puts an "Eagle"."""
    write_eagle(directory, target, published, favour=favour)
    stored = directory / "model.safetensors"
    weights = load_file(stored)
    weights.pop("lm_head.weight", None)  # fitting writes the target's own, which vLLM's EAGLE-1 refuses to read
    save_file(weights, str(stored), metadata={"format": "pt"})
    path = directory / "config.json"
    more = {"architectures": ["LlamaForCausalLM"], "attention_bias": published.attention_bias}
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return directory


def our_drafter(target: Path, drafter: Path) -> Follower:
    follower = Follower(recipe_of(target, drafter, 1, SpeculationSettings(num_draft_tokens=WIDTH)), target)
    assert isinstance(follower.speculator, EagleSpeculator)
    head = follower.speculator._passes.head
    head.logits = follower.kept(head.logits)  # type: ignore[method-assign]
    return follower


@pytest.mark.parametrize(
    ("published", "favour"), [(FITTED, 1.0), (OWN_EMBEDDING, None)], ids=["fitted", "own embedding"]
)
def test_logits_and_drafts_are_those_of_vllm(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Published, favour: float | None
) -> None:
    monkeypatch.setattr("tests.tiny_drafters.HEAD_DIM", HEAD_DIM)
    drafter = write_drafter(tmp_path / "drafter", target, published, favour)
    theirs, ours = vllm_rounds(target, drafter, "eagle", WIDTH, PROMPTS), our_drafter(target, drafter)
    for one, is_new in with_beginnings(theirs):
        assert ours.draft(one.history, is_new) == one.drafted
        errors = (torch.cat(ours.logits) - one.logits).abs().amax(dim=1) / one.logits.std(dim=1)
        assert float(errors[0]) < FIRST_TOLERANCE and float(errors.max()) < TOLERANCE, errors
    assert len(theirs) > 10
    assert favour is None or num_accepted(theirs) > 5, "no round began behind a draft of which some was accepted"
