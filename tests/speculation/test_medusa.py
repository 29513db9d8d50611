"""Medusa heads draft what float64 straight lines say, from whatever layout they come, and keep every answer as it was."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.model.weights import load_model
from engine.speculation.medusa import MedusaSpeculator
from engine.speculation.medusa_tree import best_tree, expected_accuracy
from engine.speculation.recipe import SpeculationSettings, Target, TargetFacts
from engine.speculation.registry import prepare
from engine.speculation.speculator import CommittedSpan, DraftRow, SequenceStart
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.gpu.check import DeviceReads
from tests.inprocess import Drafter, Shape
from tests.lossless import Plain, Scenario, assert_equal, check, traffic
from tests.tiny import write_tiny_model
from tests.tiny_medusa import (
    PublishedMedusa,
    TinyHeads,
    random_heads,
    target_model,
    teach_succession,
    write_medusa,
    write_predictable_model,
)

GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
HOT = SamplingParams(max_tokens=99, temperature=0.7)
VARIANTS = {
    "fasterdecoding": PublishedMedusa(),
    "two blocks": PublishedMedusa(num_blocks=2, num_heads=3),
    "pickled": PublishedMedusa(pickled=True, prefix="medusa_head."),
    "vllm": PublishedMedusa("vllm", has_bias=False),
    "vllm with biases": PublishedMedusa("vllm", prefix="medusa_heads.", num_blocks=2),
    "truncated": PublishedMedusa("vllm", draft_vocab_size=90),
    "full outputs beside a map": PublishedMedusa("vllm", draft_vocab_size=90, full_outputs=True),
    "one output": PublishedMedusa("vllm", output="shared"),
    "the target's output": PublishedMedusa("vllm", output="target"),
    "the target's output, truncated": PublishedMedusa("vllm", output="target", draft_vocab_size=90),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A tiny matrix is multiplied faster than a second thread wakes up, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("medusa") / "target")


class Bench:
    """A drafter over files, rows that have seen random hidden states, and the float64 heads to judge by."""

    def __init__(self, target: Path, directory: Path, published: PublishedMedusa, **settings: object) -> None:
        self.model = target_model(target)
        arch = self.model.arch
        self.heads: TinyHeads = random_heads(self.model, published, seed=0)
        if not directory.exists():
            write_medusa(directory, target, published)
        facts = TargetFacts(arch, self.model.dtype, self.model.device, block_size=4, max_model_len=512)
        self.recipe = prepare("medusa", SpeculationSettings(draft_model=str(directory), **settings), facts)  # type: ignore[arg-type]
        built = self.recipe.build(Target(self.model, num_blocks=8, block_size=4))
        assert isinstance(built, MedusaSpeculator)
        self.speculator = built
        self.states: dict[int, torch.Tensor] = {}

    def see(self, row: int, num_tokens: int = 5) -> None:
        """The row runs a prompt of `num_tokens`; its last hidden state is what counts."""
        generator = torch.Generator().manual_seed(row)
        taps = torch.randn(num_tokens, 1, self.model.arch.hidden_size, generator=generator)
        self.states[row] = taps[-1, 0]
        self.speculator.begin(SequenceStart(row, range(num_tokens), num_tokens))
        self.speculator.observe([CommittedSpan(row, 0, tuple(range(num_tokens)), 7, (), taps)])

    def logits(self, row: int, head: int) -> torch.Tensor:
        """Float64 [V]."""
        weights, state = self.model.weights.final_norm, self.states[row].to(torch.float64)
        read = state / (state.square().mean() + self.model.arch.norm_eps).sqrt() * weights
        return self.heads.logits(read[None], head, self.model.arch.vocab_size)[0]


def asks(row: int, budget: int, sampling: SamplingParams = GREEDY, num_tokens: int = 5) -> DraftRow:
    return DraftRow(row, (*range(num_tokens), 7), budget, num_tokens, sampling, seed=40 + row)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chain_is_every_heads_likeliest_token(target: Path, tmp_path: Path, variant: str) -> None:
    bench = Bench(target, tmp_path / "heads", VARIANTS[variant])
    width = VARIANTS[variant].num_heads
    assert bench.speculator.capabilities.max_draft_len == width
    budgets = [width, 1, 2]
    for row in range(3):
        bench.see(row, 3 + row)
    rows = [asks(row, budget, num_tokens=3 + row) for row, budget in enumerate(budgets)]
    draft = bench.speculator.propose(rows)
    assert draft.lengths.tolist() == budgets and draft.parents is None and draft.probs is None
    for row, budget in enumerate(budgets):
        wanted = [int(bench.logits(row, head).argmax()) for head in range(budget)]
        assert draft.tokens[row, :budget].tolist() == wanted


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_holds_the_ranks_of_its_nodes(target: Path, tmp_path: Path, variant: str) -> None:
    bench = Bench(target, tmp_path / "heads", VARIANTS[variant], num_draft_tokens=20, tree_top_k=5)
    tree = best_tree(20, VARIANTS[variant].num_heads, 5)
    for row in range(2):
        bench.see(row)
    draft = bench.speculator.propose([asks(0, 20), asks(1, 6)])
    assert draft.lengths.tolist() == [20, 6] and draft.parents is not None and draft.probs is None
    for row, length in ((0, 20), (1, 6)):
        ranked = [bench.logits(row, head).topk(5).indices.tolist() for head in range(max(tree.heads) + 1)]
        wanted = [ranked[head][rank] for head, rank in zip(tree.heads, tree.ranks, strict=True)]
        assert draft.tokens[row, :length].tolist() == wanted[:length]
        assert draft.parents[row, :length].tolist() == list(tree.parents[:length])


@pytest.mark.parametrize("variant", ["fasterdecoding", "truncated", "one output"])
def test_a_drawn_token_comes_with_the_distribution_of_its_own_head(target: Path, tmp_path: Path, variant: str) -> None:
    bench = Bench(target, tmp_path / "heads", VARIANTS[variant], draft_sampling="sampled")
    bench.see(0)
    bench.see(1)
    rows = [asks(0, 4, HOT), asks(1, 4, GREEDY)]
    draft = bench.speculator.propose(rows)
    assert draft.probs is not None and draft.probs.shape == (2, 4, 320)
    for head in range(4):
        wanted = (bench.logits(0, head) / 0.7).softmax(dim=0)
        torch.testing.assert_close(draft.probs[0, head].double(), wanted, atol=1e-5, rtol=1e-4)
        assert wanted[int(draft.tokens[0, head])] > 0
        assert draft.probs[1, head].nonzero().flatten().tolist() == [int(bench.logits(1, head).argmax())]
    assert torch.equal(bench.speculator.propose(rows).tokens, draft.tokens)


def test_draws_follow_their_distribution(target: Path, tmp_path: Path) -> None:
    """4000 rows with one state and different seeds: no frequency is off by more than 5 standard deviations."""
    bench = Bench(target, tmp_path / "heads", PublishedMedusa(num_heads=2), draft_sampling="sampled")
    bench.see(0)
    flat = SamplingParams(max_tokens=99, temperature=3.0)
    rows = [DraftRow(0, (*range(5), 7), 2, 5, flat, seed=seed) for seed in range(4000)]
    draft = bench.speculator.propose(rows)
    assert draft.probs is not None
    for head in range(2):
        wanted = draft.probs[0, head].double()
        seen = torch.bincount(draft.tokens[:, head].long(), minlength=320).double() / len(rows)
        deviation = (wanted * (1 - wanted) / len(rows)).sqrt() + 1e-4
        assert ((seen - wanted).abs() <= 5 * deviation).all()
    # One random number for both heads would make them agree far more often than independent draws do.
    agree = (draft.tokens[:, 0] == draft.tokens[:, 1]).double().mean()
    independent = (draft.probs[0, 0].double() * draft.probs[0, 1].double()).sum()
    assert abs(agree - independent) <= 5 * (independent * (1 - independent) / len(rows)).sqrt()


@pytest.mark.parametrize("settings", [{}, {"draft_sampling": "sampled"}, {"num_draft_tokens": 6, "tree_top_k": 3}])
def test_a_row_without_a_state_drafts_nothing(target: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    bench = Bench(target, tmp_path / "heads", PublishedMedusa(), **settings)
    nothing = bench.speculator.propose([asks(3, 4), asks(4, 4)])
    assert nothing.lengths.tolist() == [0, 0]
    bench.see(1)
    draft = bench.speculator.propose([asks(3, 4), asks(1, 4)])
    alone = bench.speculator.propose([asks(1, 4)])
    assert draft.lengths.tolist() == [0, 4]
    assert draft.tokens[1, :4].tolist() == alone.tokens[0, :4].tolist()
    for one in (nothing, draft):
        assert (one.parents is not None) == bench.speculator.capabilities.tree
        assert (one.probs is not None) == bench.speculator.capabilities.gives_probs
    bench.speculator.end(1)
    assert bench.speculator.propose([asks(1, 4)]).lengths.tolist() == [0]


def test_a_state_of_another_position_is_refused(target: Path, tmp_path: Path) -> None:
    bench = Bench(target, tmp_path / "heads", PublishedMedusa())
    bench.see(1, num_tokens=5)
    with pytest.raises(ValueError, match="row 1 has position 5 behind it; observed was 4"):
        bench.speculator.propose([asks(1, 4, num_tokens=6)])


def test_all_layouts_load_to_the_same_heads(target: Path, tmp_path: Path) -> None:
    drafts = []
    for number, published in enumerate(
        (PublishedMedusa(), PublishedMedusa("vllm"), PublishedMedusa(pickled=True), VARIANTS["vllm with biases"])
    ):
        bench = Bench(target, tmp_path / str(number), published, draft_sampling="sampled")
        bench.see(0)
        drafts.append(bench.speculator.propose([asks(0, 4, HOT)]).probs)
    assert torch.equal(drafts[0], drafts[1]) and torch.equal(drafts[0], drafts[2])
    assert not torch.equal(drafts[0], drafts[3])  # two blocks: another drafter


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_heads", [None, 2])
def test_the_memory_that_is_announced_is_the_memory_that_is_used(
    target: Path, tmp_path: Path, variant: str, num_heads: int | None
) -> None:
    bench = Bench(target, tmp_path / "heads", VARIANTS[variant], num_draft_tokens=num_heads)
    heads = bench.speculator._heads._heads
    assert len(heads) == (num_heads or VARIANTS[variant].num_heads)
    tensors = [tensor for head in heads for block in head.blocks for tensor in block if tensor is not None]
    tensors += [head.output for head in heads if head.output is not bench.model.weights.output]
    distinct = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    assert bench.recipe.weight_bytes == sum(distinct.values())


@pytest.mark.parametrize("settings", [{}, {"draft_sampling": "sampled"}, {"num_draft_tokens": 9, "tree_top_k": 3}])
def test_a_draft_never_waits_for_the_device(target: Path, tmp_path: Path, settings: dict[str, object]) -> None:
    """On torch's meta device, which has shapes and no content, looking at a value raises."""
    bench = Bench(target, tmp_path / "heads", VARIANTS["truncated"], **settings)
    read = load_model(resolve(str(target)), torch.float32, torch.device("meta"))
    on_device = bench.recipe.build(Target(read, num_blocks=8, block_size=4))
    with DeviceReads("meta") as reads:
        taps = torch.zeros(5, 1, read.arch.hidden_size, device="meta")
        on_device.observe([CommittedSpan(row, 0, tuple(range(5)), 7, (), taps) for row in range(2)])
        draft = on_device.propose([asks(0, 4, HOT), asks(1, 2), asks(2, 2)])
        on_device.observe([CommittedSpan(row, 5, (7,), 8, (), taps[:1]) for row in range(2)])
    assert reads.names == []
    assert draft.tokens.device.type == "meta" and draft.lengths.tolist() == [4, 2, 0]
    assert draft.parents is None or draft.parents.tolist()[0][:2] == [-1, 0]


def test_tree_options_are_read_by_medusa_and_options_of_others_are_refused() -> None:
    config = EngineConfig(speculator="medusa", tree_top_k=4)
    config.check_given(frozenset({"speculator", "tree_top_k", "draft_model", "draft_sampling"}))
    with pytest.raises(ValueError, match="--eagle-taps works only with --speculator eagle or eagle3"):
        config.check_given(frozenset({"eagle_taps"}))


# ---- the tree ----


@pytest.mark.parametrize(
    ("num_nodes", "num_heads", "top_k"), [(16, 3, 4), (7, 4, 2), (30, 3, 3), (1, 5, 10), (12, 1, 12)]
)
def test_the_tree_is_the_best_of_all(num_nodes: int, num_heads: int, top_k: int) -> None:
    values = []
    for depth in range(1, num_heads + 1):
        for path in itertools.product(range(top_k), repeat=depth):
            value = 1.0
            for head, rank in enumerate(path):
                value *= expected_accuracy(head, rank)
            values.append(value)
    tree = best_tree(num_nodes, num_heads, top_k)
    paths: list[tuple[int, ...]] = []
    chosen: list[float] = []
    for head, rank, parent in zip(tree.heads, tree.ranks, tree.parents, strict=True):
        assert parent < len(paths)
        before = () if parent < 0 else paths[parent]
        assert head == len(before)
        paths.append((*before, rank))
        chosen.append(expected_accuracy(head, rank) * (1.0 if parent < 0 else chosen[parent]))
    assert len(set(paths)) == len(paths) == min(num_nodes, len(values))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen == pytest.approx(sorted(values, reverse=True)[: len(chosen)])


def test_the_expectations_are_probabilities() -> None:
    for head in range(8):
        assert sum(expected_accuracy(head, rank) for rank in range(10_000)) < 1


# ---- the whole engine ----


@pytest.fixture(scope="module")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Plain]:
    root = tmp_path_factory.mktemp("predictable")
    model = write_predictable_model(root / "target")
    return model, write_medusa(root / "heads", model, PublishedMedusa(), teach=teach_succession), Plain(model)


@pytest.mark.parametrize("settings", [{}, {"num_draft_tokens": 12, "tree_top_k": 4}])
def test_heads_that_are_often_right_change_no_answer(
    predictable: tuple[Path, Path, Plain], settings: dict[str, int]
) -> None:
    """Rows among few blocks and chunks of a few tokens, with runs of several accepted tokens."""
    model, heads, plain = predictable
    drafter = Drafter("medusa", "medusa", SpeculationSettings(draft_model=str(heads), **settings))  # type: ignore[arg-type]
    shape = Shape(max_num_seqs=4, max_num_batched_tokens=13, num_blocks=22)
    scenario = Scenario(shape, (traffic(5, count=9, longest=30),), must_rise=("num_preemptions",))
    counters = check(model, scenario, drafter, plain, assert_equal)
    first, second, third = counters.accepted_per_pos[:3]
    assert first > 0.15 * counters.draft_rounds
    assert second > 5 and third > 0


# ---- what cannot be used ----


def refused(target: Path, directory: Path, sentence: str, **settings: object) -> None:
    with pytest.raises(ValueError, match=sentence):
        Bench(target, directory, PublishedMedusa(), **settings)


def edit(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) drop tensors; `__` in a name stands for a dot."""
    path = str(directory / "model.safetensors")
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.removeprefix("_").replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"_2__0__linear__weight": None}, "2.0.linear.weight is missing"),
        ({"_1__1__weight": None}, "1.1.weight is missing"),
        ({"_3__0__linear__bias": None}, "3.0.linear.bias is missing"),
        ({"_1__0__linear__weight": torch.zeros(64, 32)}, r"1.0.linear.weight has shape \(64, 32\)"),
        ({"_0__1__weight": torch.zeros(300, 64)}, r"0.1.weight has shape \(300, 64\)"),
        ({"stray": torch.zeros(1)}, "stray is not part of a Medusa drafter of 4 heads"),
        ({"_0__0__linear__weight": None}, "it is no Medusa drafter.*0.0.linear.weight.*blocks.0.layers.0.weight"),
        ({"_70__0__linear__weight": torch.zeros(64, 64)}, "it has 71 heads; 64 can be used"),
    ],
)
def test_tensors_that_cannot_be_used_are_named(
    target: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None], sentence: str
) -> None:
    write_medusa(tmp_path / "heads", target, PublishedMedusa())
    edit_tensors(tmp_path / "heads", **changes)
    refused(target, tmp_path / "heads", sentence)


@pytest.mark.parametrize(
    ("published", "token_map", "config", "sentence"),
    [
        (VARIANTS["truncated"], None, {}, "token_map is missing: the heads draft 90 of 320 tokens"),
        (VARIANTS["truncated"], torch.arange(90) + 300, {}, "token_map leaves the target's 320 tokens"),
        (VARIANTS["truncated"], torch.zeros(90, dtype=torch.int64), {}, "token_map names a token twice"),
        (VARIANTS["truncated"], torch.arange(90.0), {}, "token_map is stored as torch.float32"),
        (VARIANTS["truncated"], torch.arange(91), {}, "truncated_vocab_size of config.json is 90, but .* has 91"),
        (VARIANTS["vllm"], torch.arange(320).flip(0), {}, "token_map reorders the target's tokens"),
        (VARIANTS["vllm"], None, {"logit_scale": 0.5}, "logit_scale of config.json is 0.5"),
        (VARIANTS["vllm"], None, {"original_lm_head": True}, "lm_heads.1.weight is not part of"),
        (VARIANTS["vllm"], None, {"original_lm_head": "yes"}, "original_lm_head of config.json must be true or false"),
        (VARIANTS["vllm"], None, {"truncated_vocab_size": "x"}, "truncated_vocab_size of config.json must be a whole"),
        (VARIANTS["vllm"], None, {"medusa_fc_bias": True}, "blocks.0.layers.0.bias is missing"),
        (PublishedMedusa("vllm"), None, {"medusa_fc_bias": False}, "medusa_fc_bias of config.json is false, but"),
    ],
)
def test_conventions_that_contradict_each_other_are_named(
    target: Path,
    tmp_path: Path,
    published: PublishedMedusa,
    token_map: torch.Tensor | None,
    config: dict[str, object],
    sentence: str,
) -> None:
    write_medusa(tmp_path / "heads", target, published)
    edit_tensors(tmp_path / "heads", token_map=token_map)
    edit(tmp_path / "heads", **config)
    refused(target, tmp_path / "heads", sentence)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_draft_tokens": 5}, "--num-draft-tokens 5: 4 heads draft a chain of 4 tokens at most"),
        ({"num_draft_tokens": 8, "tree_top_k": 2, "tree_depth": 2}, "a tree of 2 levels with 2 children .* has 6$"),
        ({"tree_top_k": 2, "tree_depth": 5}, "--tree-depth must be between 1 and 4, one level per head, got 5"),
        ({"tree_top_k": 33}, "--tree-top-k must be between 0 and 32, got 33"),
        ({"tree_depth": 2}, "--tree-depth says nothing without --tree-top-k"),
        ({"tree_top_k": 2, "draft_sampling": "sampled"}, "--draft-sampling sampled cannot be had with --tree-top-k"),
        ({"draft_sampling": "both"}, "--draft-sampling must be one of greedy, sampled, got 'both'"),
    ],
)
def test_options_that_cannot_work_are_named(
    target: Path, tmp_path: Path, settings: dict[str, object], sentence: str
) -> None:
    refused(target, tmp_path / "heads", sentence, **settings)


def test_a_directory_of_heads_is_needed(target: Path, tmp_path: Path) -> None:
    model = target_model(target)
    facts = TargetFacts(model.arch, model.dtype, model.device, block_size=4, max_model_len=512)
    with pytest.raises(ValueError, match="--speculator medusa needs --draft-model"):
        prepare("medusa", SpeculationSettings(), facts)


def test_a_config_that_miscounts_is_said_and_not_believed(
    target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(target, tmp_path / "heads", PublishedMedusa())
    assert bench.speculator.capabilities.max_draft_len == 4
    assert "key=medusa_num_heads says=2 weights=4" in caplog.text
