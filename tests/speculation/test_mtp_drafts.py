"""MTP modules over pages draft what the same modules say in straight lines and float64, in every published form."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.speculation.recipe import SpeculationSettings
from protocol.sampling import SamplingParams
from tests.speculation.mtp_rows import BLOCK_SIZE, NUM_BLOCKS, Drafting, Row, drafting_of
from tests.tiny import write_tiny_model
from tests.tiny_mtp import DEEPSEEK, QWEN, PublishedMtp

FORMS = {
    "qwen": QWEN,
    "qwen-plain": PublishedMtp("qwen"),
    "qwen-3-layers": PublishedMtp("qwen", num_modules=3, model_type="qwen3_next", is_gated=True, rotary_share=0.25),
    "deepseek": PublishedMtp("deepseek", model_type="qwen2", attention_bias=True, qk_norm=False),
    "deepseek-3": DEEPSEEK,
    "deepseek-2-own-heads": PublishedMtp("deepseek", num_modules=2, has_embedding=True),
    "speculators": PublishedMtp("speculators"),
}
TOLERANCE = 2e-4  # float32 against float64
SAMPLED = SamplingParams(max_tokens=60, temperature=1.0)

Make = Callable[..., Drafting]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mtp") / "target", seed=3)


@pytest.fixture
def make(target: Path, tmp_path: Path) -> Make:
    def build(published: PublishedMtp, **settings: object) -> Drafting:
        return drafting_of(target, tmp_path / "modules", published, SpeculationSettings(**settings))  # type: ignore[arg-type]

    return build


def prompt_of(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 320) for _ in range(length)]


def drafted(rows: list[Row], budgets: list[int]) -> list[list[int]]:
    [first, *_] = rows
    with torch.inference_mode():
        draft = first.drafting.speculator.propose([row.asks(budget) for row, budget in zip(rows, budgets, strict=True)])
    assert draft.parents is None
    lengths = draft.lengths.tolist()
    return [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), lengths, strict=True)]


def observe(rows: list[Row], ends: list[int]) -> None:
    told = [row.span(end) for row, end in zip(rows, ends, strict=True) if end > row.told]
    with torch.inference_mode():
        rows[0].drafting.speculator.observe(told)


def check(rows: list[Row], budgets: list[int]) -> list[list[int]]:
    proposals = drafted(rows, budgets)
    for row, budget, proposal in zip(rows, budgets, proposals, strict=True):
        assert proposal == row.drafting.reference(row.history, budget).tokens
    return proposals


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_modules_in_float64(make: Make, form: str) -> None:
    """Prompts of all lengths in chunks of all sizes, then rounds that keep none, some or all of a draft."""
    drafting = make(FORMS[form])
    width = drafting.speculator.capabilities.max_draft_len
    rows = [Row(number, prompt_of(number, length), drafting) for number, length in enumerate((21, 2, 1))]
    for row in rows:
        row.history += prompt_of(50 + row.number, 1)
    observe(rows[:1], [7])
    observe(rows[:2], [8, 1])
    observe(rows, [21, 2, 1])
    check(rows, [width, 1, width])
    for number in range(5):
        proposals = check(rows, [width] * 3)
        kept = [proposal[: (number + row.number) % (width + 1)] for row, proposal in zip(rows, proposals, strict=True)]
        for row, tokens in zip(rows, kept, strict=True):
            row.history += [*tokens, 7 + number]
        observe(rows, [len(row.history) - 1 for row in rows])
    check(rows, [width, 2, 1])


@pytest.mark.parametrize("form", FORMS)
def test_keys_of_committed_positions_are_those_from_scratch(make: Make, form: str) -> None:
    drafting = make(FORMS[form])
    rows = [Row(number, [*prompt_of(number, length), 9], drafting) for number, length in enumerate((14, 1))]
    observe(rows, [5, 1])
    observe(rows[:1], [14])
    for number in range(4):
        width = drafting.speculator.capabilities.max_draft_len
        [proposal, _] = drafted(rows, [width, 1])
        rows[0].history += [*proposal[:number], 30 + number]
        rows[1].history += [30 + number]
        observe(rows, [len(row.history) - 1 for row in rows])
    for row in rows:
        for module in range(len(drafting.dense)):
            known = len(row.history) - 1 - module
            assert known > 0
            ours, wanted = row.keys(module, known), row.dense_keys(module, known)
            assert torch.allclose(ours.to(torch.float64), wanted, atol=TOLERANCE), (row.number, module)


@pytest.mark.parametrize("form", ["qwen", "deepseek-3"])
def test_drawn_tokens_come_with_what_they_were_drawn_from(make: Make, form: str) -> None:
    drafting = make(FORMS[form], draft_sampling="sampled")
    width = drafting.speculator.capabilities.max_draft_len
    greedy = Row(0, [*prompt_of(0, 9), 5], drafting)
    drawing = Row(1, [*prompt_of(1, 12), 6], drafting, params=SAMPLED)
    observe([greedy, drawing], [9, 12])
    with torch.inference_mode():
        draft = drafting.speculator.propose([greedy.asks(width), drawing.asks(width)])
    assert draft.probs is not None
    tokens = draft.tokens.tolist()
    assert tokens[0] == drafting.reference(greedy.history, width).tokens
    one_hot = torch.nn.functional.one_hot(draft.tokens[0].long(), 320)
    assert torch.equal(draft.probs[0], one_hot.float())
    told = drafting.reference(drawing.history, width, drawn=tokens[1])
    wanted = torch.stack(told.logits).softmax(dim=1)
    assert torch.allclose(draft.probs[1].to(torch.float64), wanted, atol=TOLERANCE)
    assert tokens[1] != drafting.reference(drawing.history, width).tokens


@pytest.mark.parametrize("form", FORMS)
def test_a_row_behind_a_cache_hit_drafts_as_one_that_computed_everything(make: Make, form: str) -> None:
    """It never hears of the positions before the hit; whoever computed them left every module's keys there."""
    drafting = make(FORMS[form])
    width, lookahead = (getattr(drafting.speculator.capabilities, name) for name in ("max_draft_len", "lookahead"))
    text = prompt_of(4, 3 * BLOCK_SIZE + lookahead)
    first = Row(0, text, drafting)  # as few tokens behind the third block as make it findable
    observe([first], [len(text) - 1])
    drafted([first], [width])
    hit = 3 * BLOCK_SIZE
    second = Row(1, [*text, 12, 13], drafting, block_ids=(0, 1, 2, *range(20, 30)), told=hit)
    observe([second], [len(second.history) - 1])
    check([second], [width])
    first.history += [14]
    observe([first], [len(first.history) - 1])
    check([first, second], [width, width])


@pytest.mark.parametrize("form", ["qwen", "deepseek-3"])
def test_what_was_in_the_blocks_before_is_never_read(make: Make, form: str) -> None:
    drafting = make(FORMS[form])
    drafting.pool.keys.fill_(torch.nan)
    drafting.pool.values.fill_(torch.nan)
    rows = [Row(number, [*prompt_of(number, length), 9], drafting) for number, length in enumerate((3, 17, 1))]
    observe(rows, [3, 17, 1])
    width = drafting.speculator.capabilities.max_draft_len
    proposals = check(rows, [width] * 3)
    for row, proposal in zip(rows, proposals, strict=True):
        row.history += [*proposal, 8]
    observe(rows, [len(row.history) - 1 for row in rows])
    check(rows, [width] * 3)


@pytest.mark.parametrize("form", ["qwen", "deepseek-3"])
def test_a_span_that_is_told_twice_changes_nothing(make: Make, form: str) -> None:
    """As when another row's span raised: then all are told again, one by one."""
    drafting = make(FORMS[form])
    rows = [Row(number, [*prompt_of(number, 6), 9], drafting) for number in range(2)]
    observe(rows, [6, 6])
    told = [row.commit([20, 21]) for row in rows]
    without_blocks = type(told[1])(**{**vars(told[1]), "block_ids": ()})
    with torch.inference_mode():
        with pytest.raises((ValueError, IndexError)):
            drafting.speculator.observe([told[0], without_blocks])
        drafting.speculator.observe(told[:1])
        drafting.speculator.observe(told[1:])
    check(rows, [drafting.speculator.capabilities.max_draft_len] * 2)


@pytest.mark.parametrize("form", ["qwen", "deepseek-3"])
def test_rows_beyond_the_context_run_without_drafts(make: Make, form: str) -> None:
    published = FORMS[form]
    drafting = make(PublishedMtp(**{**vars(published), "context_length": 12}))
    width = drafting.speculator.capabilities.max_draft_len
    inside, edge, beyond = (
        Row(number, [*prompt_of(number, length), 9], drafting) for number, length in enumerate((5, 10, 14))
    )
    observe([inside, edge, beyond], [5, 10, 14])
    assert [len(proposal) for proposal in drafted([inside, edge, beyond], [width] * 3)] == [width, 2, 0]
    check([inside, edge], [width, 2])
    assert drafted([beyond], [width]) == [[]]


@pytest.mark.parametrize("form", ["qwen", "deepseek-3"])
def test_a_row_that_was_not_told_of_is_refused(make: Make, form: str) -> None:
    drafting = make(FORMS[form])
    row = Row(0, prompt_of(0, 6), drafting)
    with pytest.raises(ValueError, match="row 0 has position 4 behind it; observed was"):
        drafted([row], [1])


def test_a_gap_in_what_several_modules_hear_is_refused(make: Make) -> None:
    drafting = make(FORMS["deepseek-3"])
    row = Row(0, prompt_of(0, 12), drafting)
    observe([row], [4])
    row.told = 6
    with pytest.raises(ValueError, match="row 0 goes on at position 6; observed was up to 4"):
        observe([row], [8])


def test_no_rows_are_legal(make: Make) -> None:
    for form in ("qwen", "deepseek-3"):
        speculator = make(FORMS[form]).speculator
        draft = speculator.propose([])
        assert draft.tokens.shape == (0, speculator.capabilities.max_draft_len)
        speculator.observe([])


def test_pages_are_as_many_as_the_targets(make: Make) -> None:
    drafting = make(FORMS["deepseek-3"])
    assert drafting.pool.keys.shape[:3] == (3, NUM_BLOCKS, BLOCK_SIZE)
    assert drafting.speculator.capabilities.lookahead == 3
