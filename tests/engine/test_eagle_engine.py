"""EAGLE drafts through the whole engine: often right, never heard, and keys that are those of the text alone.

The target's layers say little next to its embedding, so that a fitted head is right again and again: chains are accepted
whole, trees along bent paths, and what was accepted is what later sequences find in the cache.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.kv.pool import KVPool
from engine.plan import StepPlan
from engine.speculation.recipe import SpeculationSettings
from protocol.messages import Submit
from tests.inprocess import Drafter, InProcessEngine, Logits, Shape
from tests.lossless import SCENARIOS, Plain, assert_equal, check, request
from tests.tiny import write_tiny_model
from tests.tiny_drafters import Published, write_eagle

PUBLISHED = {
    "eagle": Published("eagle", taps=(2,), fc_bias=True, has_head=False),
    "eagle3": Published("safeailab", taps=(1, 2), draft_vocab_size=300),
}
SETTINGS = {
    "eagle-chain": ("eagle", {"num_draft_tokens": 5}),
    "eagle-tree": ("eagle", {"num_draft_tokens": 8, "tree_top_k": 2, "tree_depth": 5}),
    "eagle3-tree": ("eagle3", {"num_draft_tokens": 12, "tree_top_k": 4, "tree_depth": 4}),
    "eagle3-sampled": ("eagle3", {"num_draft_tokens": 3, "draft_sampling": "sampled"}),
}
EXACT = 2e-5  # float32: batches of another shape round otherwise


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("eagle")
    target = write_tiny_model(root / "target", "llama", seed=5)
    path = target / "model.safetensors"
    weights = load_file(path)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= 0.04
    save_file(weights, str(path))
    for name, published in PUBLISHED.items():
        write_eagle(root / name, target, published, favour=1.0)
    return root


@pytest.fixture(scope="module")
def plain(directory: Path) -> Plain:
    return Plain(directory / "target")


def drafter_of(directory: Path, label: str) -> Drafter:
    name, settings = SETTINGS[label]
    return Drafter(label, name, SpeculationSettings(draft_model=str(directory / name), **settings))


@pytest.mark.parametrize(
    ("scenario", "label"),
    [*(("cached", label) for label in SETTINGS), ("cramped", "eagle-chain"), ("cramped", "eagle-tree")],
)
def test_answers_are_the_plain_ones_when_drafts_are_often_right(
    directory: Path, plain: Plain, scenario: str, label: str
) -> None:
    traffic = SCENARIOS[scenario](plain)
    counters = check(directory / "target", traffic, drafter_of(directory, label), plain, assert_equal)
    is_first = label.startswith(
        "eagle-"
    )  # fitted far better than an EAGLE-3, which sees the new token by attention alone
    least = 0.2 if is_first else 0.05
    assert counters.accepted_per_pos[0] > least * counters.draft_rounds, "the drafter is hardly ever right"
    assert not is_first or counters.accepted_per_pos[2] > 0, "no accepted path was three tokens long"


class Keys:
    """An engine whose draft and target keys can be read while a sequence has its blocks."""

    def __init__(self, directory: Path, drafter: Drafter, shape: Shape) -> None:
        self.engine = InProcessEngine(directory / "target", shape, drafter)
        self._plans: list[StepPlan] = []
        self.engine.executor.during = self._plans.append

    def run(self, submit: Submit) -> tuple[int, ...]:
        self.engine.forget()
        self.engine.submit(submit)
        self.engine.run_dry()
        return self.engine.answers()[submit.request_id, 0].token_ids

    def of_prompt(self, submit: Submit) -> list[torch.Tensor]:
        """Keys and values of every prompt position but the last, of the target's pool and of the drafter's."""
        self._plans.clear()
        self.engine.forget()
        self.engine.submit(submit)
        while not any(span.kind.is_round for plan in self._plans for span in plan.spans):
            self.engine.step()  # the step of the first round heard of the whole prompt
        span = self._plans[-1].spans[0]
        inner = self.engine.executor._inner
        pools: list[KVPool] = [inner._runner.pool, inner._speculator._passes.pool]
        end = len(submit.prompt_token_ids) - 1
        slots = [pools[0].slot(span.block_ids, position) for position in range(end)]
        found = [part.flatten(1, 2)[:, slots].clone() for pool in pools for part in (pool.keys, pool.values)]
        self.engine.run_dry()
        return found


@pytest.mark.parametrize("label", ["eagle-tree", "eagle3-tree", "eagle3-sampled"])
def test_what_a_drafted_sequence_leaves_in_the_cache_is_what_computing_it_gives(directory: Path, label: str) -> None:
    """A sequence ends in the middle of accepted tree nodes; the next turn finds its blocks, nodes in line, keys in place."""
    drafter = drafter_of(directory, label)
    used = Keys(directory, drafter, Shape())
    fresh = Keys(directory, drafter, Shape(prefix_caching=False, max_num_batched_tokens=7))
    for number, phrase in enumerate([(5, 9, 70), (100, 33), (8, 61, 12, 250, 19)]):
        prompt = list(phrase) * 3
        for max_tokens in (10, 13, 11):
            first = request(number, prompt, {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens})
            answer = used.run(first)
            prompt = [*prompt, *answer, 5]
        hits = used.engine.counters.prefix_cache_hits
        second = request(number, prompt, {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True})
        for ours, scratch in zip(used.of_prompt(second), fresh.of_prompt(second), strict=True):
            assert torch.allclose(ours, scratch, rtol=0, atol=EXACT), (ours - scratch).abs().max()
        assert used.engine.counters.prefix_cache_hits > hits, "nothing was found in the cache: it proved nothing"
    accepted = used.engine.counters.accepted_per_pos
    assert accepted[1 if label == "eagle-tree" else 0] > 0, "nothing that was drafted was left behind"


def test_sampled_drafts_leave_the_targets_law(directory: Path) -> None:
    """All 27 answers of three tokens, top_k 3 each, against their exact probabilities: false alarm once in a million."""
    critical = 79.0  # chi-square with 26 degrees of freedom: exceeded with probability 3e-7
    prompt, count = [5, 9, 70, 5, 9, 70, 5], 1500
    logits = Logits(directory / "target", "cpu", "fp32")
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, mass in law.items():
            best = logits([*prompt, *path])[-1].double().topk(3)
            for token, share in zip(best.indices.tolist(), best.values.softmax(dim=0).tolist(), strict=True):
                longer[(*path, token)] = mass * share
        law = longer
    settings = SpeculationSettings(draft_model=str(directory / "eagle"), num_draft_tokens=3, draft_sampling="sampled")
    shape = Shape(max_num_seqs=64, num_blocks=500)
    engine = InProcessEngine(directory / "target", shape, Drafter("sampled", "eagle", settings))
    sampling = {"temperature": 1.0, "top_k": 3, "max_tokens": 3, "ignore_eos": True}
    seen = dict.fromkeys(law, 0)
    for first in range(0, count, 500):
        for number in range(first, first + 500):
            engine.submit(request(number, prompt, {**sampling, "seed": number}))
        engine.run_dry(checks=False)
        for answer in engine.answers().values():
            seen[answer.token_ids] += 1
        counters = engine.counters
        engine.forget()
    assert 0.02 < counters.accepted_tokens / counters.draft_tokens < 0.95, "both verdicts must be frequent"
    assert sum((seen[path] - count * mass) ** 2 / (count * mass) for path, mass in law.items()) < critical
