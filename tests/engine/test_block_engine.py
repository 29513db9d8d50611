"""Block drafts through the whole engine: often right, never heard, and a misread block is noticed.

The target's layers say little next to its embedding, so that a fitted drafter is right again and again.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.speculation.recipe import BlockOverrides, SpeculationSettings
from tests.inprocess import Drafter, InProcessEngine, Logits, Shape
from tests.lossless import SCENARIOS, Plain, assert_equal, check, request
from tests.tiny_blocks import PublishedBlock, write_block
from tests.tiny_medusa import write_predictable_model

PUBLISHED = {
    "dflash": PublishedBlock("deepspec", anchor="first", num_layers=1, has_head=True),
    "dspark": PublishedBlock(
        "speculators", anchor="drop", says_anchor=True, num_layers=1, markov="vanilla", rank=64, confidence="markov",
        has_head=True, draft_vocab_size=300,
    ),
}  # fmt: skip
SETTINGS = {
    "dflash": ("dflash", {}),
    "dflash-sampled": ("dflash", {"num_draft_tokens": 3, "draft_sampling": "sampled"}),
    "dspark-cut": ("dspark", {"confidence_threshold": 0.4}),
    "dspark-sampled-cut": ("dspark", {"draft_sampling": "sampled", "confidence_threshold": 0.4}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("block")
    target = write_predictable_model(root / "target", strength=0.04)
    for name, published in PUBLISHED.items():
        write_block(root / name, target, published, favour=1.0)
    return root


@pytest.fixture(scope="module")
def plain(directory: Path) -> Plain:
    return Plain(directory / "target")


def drafter_of(directory: Path, label: str, **more: object) -> Drafter:
    name, settings = SETTINGS[label]
    return Drafter(label, name, SpeculationSettings(draft_model=str(directory / name), **settings, **more))


@pytest.mark.parametrize("label", ["dflash", "dspark-cut", "dspark-sampled-cut"])
def test_answers_are_the_plain_ones_when_drafts_are_often_right(directory: Path, plain: Plain, label: str) -> None:
    traffic = SCENARIOS["cached"](plain)
    counters = check(directory / "target", traffic, drafter_of(directory, label), plain, assert_equal)
    assert counters.accepted_per_pos[0] > 0.1 * counters.draft_rounds, "the drafter is hardly ever right"
    assert (counters.plain_rounds > 0.2 * counters.draft_rounds) == label.endswith("cut"), "cut to nothing, or never"


@pytest.mark.parametrize("label", ["dflash-sampled", "dspark-sampled-cut"])
def test_sampled_drafts_leave_the_targets_law(directory: Path, label: str) -> None:
    """All 27 answers of three tokens, top_k 3 each, against their exact probabilities: false alarm once in a million."""
    critical = 79.0  # chi-square with 26 degrees of freedom: exceeded with probability 3e-7
    prompt, count = [5, 9, 70, 5, 9, 70, 5], 800
    logits = Logits(directory / "target", "cpu", "fp32")
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for path, mass in law.items():
            best = logits([*prompt, *path])[-1].double().topk(3)
            for token, share in zip(best.indices.tolist(), best.values.softmax(dim=0).tolist(), strict=True):
                longer[(*path, token)] = mass * share
        law = longer
    engine = InProcessEngine(directory / "target", Shape(max_num_seqs=64, num_blocks=500), drafter_of(directory, label))
    sampling = {"temperature": 1.0, "top_k": 3, "max_tokens": 3, "ignore_eos": True}
    seen = dict.fromkeys(law, 0)
    for first in range(0, count, 400):
        for number in range(first, first + 400):
            engine.submit(request(number, prompt, {**sampling, "seed": number}))
        engine.run_dry(checks=False)
        for answer in engine.answers().values():
            seen[answer.token_ids] += 1
        counters = engine.counters
        engine.forget()
    assert 0.02 < counters.accepted_tokens / counters.draft_tokens < 0.98, "both verdicts must be frequent"
    assert sum((seen[path] - count * mass) ** 2 / (count * mass) for path, mass in law.items()) < critical


@pytest.mark.parametrize("anchor", ["first", "drop"])
def test_a_block_read_in_the_wrong_layout_is_warned_about(
    directory: Path, anchor: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The one thing that tells the two layouts apart is that drafts are never right in the other."""
    drafter = drafter_of(directory, "dflash", block=BlockOverrides(anchor=anchor))
    engine = InProcessEngine(directory / "target", Shape(max_num_seqs=8, num_blocks=300), drafter)
    for number in range(8):
        prompt = [number * 31 % 300 + 5, 9, number * 17 % 300 + 3]
        engine.submit(request(number, prompt, {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}))
    with caplog.at_level(logging.WARNING):
        engine.run_dry(checks=False)
    assert engine.counters.draft_rounds > 200
    warned = [record.getMessage() for record in caplog.records if "almost never right" in record.getMessage()]
    assert len(warned) == (1 if anchor == "drop" else 0)
    assert all("(--block-anchor, now drop)" in message for message in warned)
