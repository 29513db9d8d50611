"""Medusa heads against vLLM 0.32.0, whole: its engine and its Medusa proposer; logits and drafted tokens.

Both sides read the same directories and follow the same text round by round, so that what is compared includes which
position's hidden state the heads read, and that it is the normed one.
"""

import json
from pathlib import Path

import pytest
import torch

from engine.speculation.medusa import MedusaSpeculator
from engine.speculation.recipe import SpeculationSettings
from engine.speculation.registry import prepare
from tests.oracles.following import Follower
from tests.oracles.vllm_rounds import num_accepted, vllm_rounds, with_beginnings, write_target
from tests.speculation.eagle_harness import facts_of
from tests.tiny_medusa import NUM_HEADS, PublishedMedusa, fit_text, write_medusa

pytest.importorskip("vllm")
pytestmark = pytest.mark.timeout(600)  # a whole engine starts, which takes minutes of a busy machine

TOLERANCE = 2e-5  # of the spread of the logits: one hidden state, float32 on both sides, summed in other orders
PROMPTS = [[5, 6, 7, 8] * 4, [100], [9, 70, 31, 250, 12, 12]]
# vLLM drops biases that config.json does not announce, and believes it about the heads' width and number, which
# FasterDecoding's own files leave out and miscount. A reduced vocabulary it does not load: it misses a `token_map` it read.
ANNOUNCED = {"medusa_fc_bias": True, "medusa_num_heads": NUM_HEADS, "hidden_size": 64}
CASES = {
    "vllm": (PublishedMedusa("vllm", has_bias=False), {}),
    "fasterdecoding": (PublishedMedusa(num_blocks=2), ANNOUNCED),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("medusa") / "target", strength=0.01)


def our_heads(target: Path, directory: Path) -> Follower:
    follower = Follower(prepare("medusa", SpeculationSettings(draft_model=str(directory)), facts_of(target)), target)
    assert isinstance(follower.speculator, MedusaSpeculator)
    heads = follower.speculator._heads
    heads.logits = follower.kept(heads.logits)  # type: ignore[method-assign]
    return follower


@pytest.mark.parametrize("name", CASES)
def test_logits_and_drafts_are_those_of_vllm(target: Path, tmp_path: Path, name: str) -> None:
    published, config = CASES[name]
    heads = write_medusa(tmp_path / "heads", target, published, teach=fit_text)
    path = heads / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    theirs, ours = vllm_rounds(target, heads, "medusa", NUM_HEADS, PROMPTS), our_heads(target, heads)
    for one, is_new in with_beginnings(theirs):
        assert ours.draft(one.history, is_new) == one.drafted
        wanted, known = one.logits, one.logits.isfinite()
        logits = ours.speculator._heads.target_logits(torch.cat(ours.logits))
        assert torch.equal(logits.isfinite(), known)
        errors = (logits - wanted)[known].abs().max() / wanted[known].std()
        assert float(errors) < TOLERANCE, errors
    assert len(theirs) > 10
    assert num_accepted(theirs) > 5, "no round began behind a draft of which some was accepted"
