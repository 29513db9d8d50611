"""UNO's drafts against straight-line float64: the target with an adapter on the rows of noise alone.

Rows of all lengths and budgets are drafted in one call over scattered blocks that hold a NaN where nothing was written.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from engine.kv.pool import KVPool, KVShape
from engine.model.attention import SpanLayout
from engine.model.decoder import ForwardInput
from engine.model.grouped import GroupedAttention
from engine.noise import Purpose, uniforms
from engine.race import draw
from engine.speculation.draft import Draft
from engine.speculation.recipe import SpeculationSettings, Target, TargetFacts
from engine.speculation.registry import prepare
from engine.speculation.speculator import CommittedSpan, DraftRow, Speculator
from engine.transforms import Truncation, target_probs
from protocol.model_files import resolve
from protocol.sampling import SamplingParams
from tests.tiny import Family, write_tiny_model
from tests.tiny_drafters import target_model
from tests.tiny_uno import ALPHA, RANK, random_adapter, write_uno
from tests.uno_reference import DenseTarget

BLOCK_SIZE, NUM_BLOCKS, VOCAB = 4, 80, 320
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Bench:
    """A tiny target, a random adapter for it, and the drafter over pages filled by hand."""

    def __init__(self, root: Path, family: Family, **settings: object) -> None:
        self.directory = root / family
        if not self.directory.exists():
            write_tiny_model(self.directory, family, seed=5, tied=family == "qwen2")
            write_uno(root / f"{family}-uno", self.directory)
        self.model = target_model(self.directory)
        arch = self.model.arch
        shape = KVShape(arch.num_layers, arch.num_kv_heads, arch.head_dim, BLOCK_SIZE, torch.float32)
        self.pool = KVPool(shape, NUM_BLOCKS, torch.device("cpu"))
        facts = TargetFacts(arch, torch.float32, torch.device("cpu"), BLOCK_SIZE, 512, resolve(str(self.directory)))
        asked = SpeculationSettings(draft_model=str(root / f"{family}-uno"), **settings)  # type: ignore[arg-type]
        recipe = prepare("uno", asked, facts)
        self.speculator: Speculator = recipe.build(Target(self.model, NUM_BLOCKS, BLOCK_SIZE, self.pool))
        self.dense = DenseTarget(self.directory, random_adapter(self.directory), ALPHA / RANK)
        self._free = list(range(NUM_BLOCKS))
        random.Random(5).shuffle(self._free)

    @torch.inference_mode()
    def row(self, number: int, history: Sequence[int], budget: int, sampling: SamplingParams = GREEDY) -> DraftRow:
        """The row with everything but its root computed."""
        needed = -(-(len(history) + budget) // BLOCK_SIZE)
        blocks = tuple(self._free[:needed])
        del self._free[:needed]
        slots = [self.pool.slot(blocks, position) for position in range(needed * BLOCK_SIZE)]
        self.pool.keys.flatten(1, 2)[:, slots[len(history) // BLOCK_SIZE * BLOCK_SIZE :]] = torch.nan
        self.pool.values.flatten(1, 2)[:, slots[len(history) // BLOCK_SIZE * BLOCK_SIZE :]] = torch.nan
        count = len(history) - 1
        attention = GroupedAttention(self.pool, self.model.arch.num_heads)
        if count:
            behind = slots[count : -(-count // BLOCK_SIZE) * BLOCK_SIZE]
            self.pool.clear(torch.tensor(behind, dtype=torch.int64))
            step = ForwardInput(torch.tensor(history[:-1]), torch.arange(count), torch.tensor(slots[:count]))
            self.model.forward(step, attention, attention.layout([SpanLayout(0, count, blocks)]))
        return DraftRow(number, tuple(history), budget, 1, sampling, 1000 + number, blocks)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return self.speculator.propose(rows)

    def guesses(self, row: DraftRow, count: int) -> torch.Tensor:
        """Float64 [1 + count, V] of the reference, for the noise that belongs to the row."""
        positions = torch.arange(len(row.token_ids), len(row.token_ids) + count)
        noise = (uniforms(torch.tensor(row.seed), positions, Purpose.NOISE) * VOCAB).long().tolist()
        return self.dense.uno(row.token_ids, noise)


def texts(count: int, longest: int = 19) -> list[list[int]]:
    generator = random.Random(3)
    return [[generator.randrange(3, VOCAB) for _ in range(generator.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_roots_and_guesses_are_the_references(tmp_path: Path, family: Family) -> None:
    bench = Bench(tmp_path, family, num_draft_tokens=6)
    rows = [bench.row(number, text, 2 + number % 5) for number, text in enumerate(texts(8))]
    draft = bench.propose(rows)
    assert draft.roots is not None and draft.has_root is not None and draft.parents is draft.probs is None
    assert draft.num_forwards == 1
    for index, row in enumerate(rows):
        wanted = bench.guesses(row, row.budget - 1).argmax(dim=1).tolist()
        assert bool(draft.has_root[index])
        assert [int(draft.roots[index]), *draft.tokens[index, : int(draft.lengths[index])].tolist()] == wanted


def test_an_adapter_never_reaches_the_root(tmp_path: Path) -> None:
    """The root is the target's own; the guesses are not what they would be without the adapter."""
    bench = Bench(tmp_path, "llama", num_draft_tokens=6)
    plain = DenseTarget(bench.directory)
    changed = 0
    for number, text in enumerate(texts(6)):
        row = bench.row(number, text, 6)
        draft = bench.propose([row])
        assert draft.roots is not None
        positions = torch.arange(len(text), len(text) + 5)
        noise = (uniforms(torch.tensor(row.seed), positions, Purpose.NOISE) * VOCAB).long().tolist()
        said = plain.uno(text, noise).argmax(dim=1).tolist()
        assert int(draft.roots[0]) == said[0]
        changed += sum(a != b for a, b in zip(draft.tokens[0, :5].tolist(), said[1:], strict=True))
    assert changed > 20


def test_drawn_drafts_come_with_what_they_were_drawn_from(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama", num_draft_tokens=5, draft_sampling="sampled")
    hot = SamplingParams(max_tokens=100, temperature=0.8, top_k=30, top_p=0.9)
    rows = [bench.row(number, text, 5, hot if number % 2 else GREEDY) for number, text in enumerate(texts(6))]
    draft = bench.propose(rows)
    assert draft.probs is not None and draft.roots is not None
    for index, row in enumerate(rows):
        logits = bench.guesses(row, 4)
        length = len(row.token_ids)
        for step in range(4):
            got, token = draft.probs[index, step], int(draft.tokens[index, step])
            if row.sampling.is_greedy:
                assert token == int(logits[1 + step].argmax()) and float(got[token]) == float(got.sum()) == 1.0
                continue
            wanted = target_probs(logits[1 + step : 2 + step], Truncation.of([hot], VOCAB, got.device))[0]
            assert torch.allclose(got.double(), wanted, atol=2e-4)
            number = uniforms(torch.tensor([row.seed]), torch.tensor([length + 1 + step]), Purpose.DRAFT)
            assert token == int(draw(got.double()[None], number))


def test_a_drawn_root_is_the_token_of_plain_decoding(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama", num_draft_tokens=4)
    hot = SamplingParams(max_tokens=100, temperature=0.9, top_p=0.95)
    rows = [bench.row(number, text, 4, hot) for number, text in enumerate(texts(12))]
    draft = bench.propose(rows)
    assert draft.roots is not None
    likeliest = 0
    for index, row in enumerate(rows):
        logits = bench.guesses(row, 1)[:1]
        number = uniforms(torch.tensor([row.seed]), torch.tensor([len(row.token_ids)]), Purpose.SAMPLE)
        wanted = int(draw(target_probs(logits, Truncation.of([hot], VOCAB, logits.device)), number))
        assert int(draft.roots[index]) == wanted
        likeliest += wanted == int(logits.argmax())
    assert likeliest < 12


def test_a_tree_holds_the_likeliest_paths(tmp_path: Path) -> None:
    """Against every path of the reference's choices, best first."""
    levels, top_k, nodes = 3, 3, 7
    bench = Bench(tmp_path, "qwen3", num_draft_tokens=nodes + 1, tree_top_k=top_k, tree_depth=levels)
    rows = [bench.row(number, text, nodes + 1) for number, text in enumerate(texts(5))]
    draft = bench.propose(rows)
    assert draft.parents is not None and draft.roots is not None
    for index, row in enumerate(rows):
        log_probs = bench.guesses(row, levels).log_softmax(dim=1)
        assert int(draft.roots[index]) == int(log_probs[0].argmax())
        values, tokens = log_probs[1:].topk(top_k, dim=1)
        paths = {
            tuple(int(tokens[level, rank]) for level, rank in enumerate(ranks)): float(
                sum(values[level, rank] for level, rank in enumerate(ranks))
            )
            for depth in range(1, levels + 1)
            for ranks in product(range(top_k), repeat=depth)
        }
        best = sorted(paths, key=lambda path: -paths[path])[:nodes]
        assert int(draft.lengths[index]) == nodes
        assert sorted(_paths(draft, index)) == sorted(best)


def _paths(draft: Draft, index: int) -> list[tuple[int, ...]]:
    assert draft.parents is not None
    paths: list[tuple[int, ...]] = []
    for node in range(int(draft.lengths[index])):
        parent, token = int(draft.parents[index, node]), int(draft.tokens[index, node])
        paths.append((token,) if parent < 0 else (*paths[parent], token))
    return paths


def test_noise_belongs_to_seed_and_position(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama", num_draft_tokens=6)
    text = texts(1)[0]
    row = bench.row(0, text, 6)
    other = DraftRow(0, row.token_ids, 6, 1, GREEDY, row.seed + 1, row.block_ids)
    first, again, elsewhere = bench.propose([row]), bench.propose([row]), bench.propose([other])
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, elsewhere.tokens)
    assert first.roots is not None and elsewhere.roots is not None and torch.equal(first.roots, elsewhere.roots)


def test_room_for_the_root_alone_is_left_to_plain_decoding(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama", num_draft_tokens=6)
    one, more = bench.row(0, texts(1)[0], 1), bench.row(1, texts(2)[1], 3)
    draft = bench.propose([one, more])
    assert draft.roots is not None and draft.has_root is not None
    assert (draft.lengths.tolist(), draft.has_root.tolist()) == ([0, 2], [False, True])
    assert int(draft.roots[0]) == -1
    alone = bench.propose([one])
    assert alone.lengths.tolist() == [0] and alone.has_root is None and alone.num_forwards == 0


def test_a_root_that_cannot_be_drawn_is_none(tmp_path: Path) -> None:
    """Its row has one all the same: the verdict has to fail it."""
    bench = Bench(tmp_path, "llama", num_draft_tokens=4)
    good, bad = (bench.row(number, [9, 8, 7, 6, 5, 4], 4) for number in range(2))
    bench.pool.values[0, bad.block_ids[0], 0] = torch.inf
    draft = bench.propose([good, bad])
    assert draft.roots is not None and draft.has_root is not None
    assert int(draft.roots[0]) >= 0 and int(draft.roots[1]) == -1
    assert draft.has_root.tolist() == [True, True]


def test_drafts_that_are_never_right_are_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random adapter: what is committed is never what the first noise row guessed."""
    monkeypatch.setattr("engine.speculation.first_token_watch.NUM_DRAFTS", 20)
    bench = Bench(tmp_path, "llama", num_draft_tokens=3)
    row = bench.row(0, texts(1)[0], 3)
    length = len(row.token_ids)
    for _ in range(25):
        draft = bench.propose([row])
        assert draft.roots is not None
        root, guess = int(draft.roots[0]), int(draft.tokens[0, 0])
        span = CommittedSpan(0, length - 1, [row.token_ids[-1], root], (guess + 1) % VOCAB, row.block_ids, None)
        bench.speculator.observe([span])
    warned = [record.getMessage() for record in caplog.records if "almost never right" in record.getMessage()]
    assert len(warned) == 1 and "adapter_config.json says is 'example/tiny'" in warned[0]
