"""A frozen-KV assistant over the target's pages drafts what the same weights say in straight lines and float64."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.speculation.recipe import SpeculationSettings
from engine.speculation.speculator import CommittedSpan
from protocol.sampling import SamplingParams
from tests.speculation.frozen_kv_rows import Rig, Row, rig_of
from tests.tiny import Family, write_tiny_model
from tests.tiny_frozen_kv import PLAIN, PublishedAssistant

FORMS: dict[str, tuple[Family, PublishedAssistant]] = {
    "plain": ("llama", PLAIN),
    "clusters": ("llama", PublishedAssistant(clusters=(16, 5), num_layers=3)),
    "biases": ("qwen2", PublishedAssistant(attention_bias=True, has_head=True)),
    "other-heads": ("qwen3", PublishedAssistant(num_heads=6, width=32, num_layers=1)),
}
WIDTH = 3
TOLERANCE = 2e-4  # float32 against float64
SAMPLED = SamplingParams(max_tokens=60, temperature=3.0)

Make = Callable[..., Rig]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(form: str, published: PublishedAssistant | None = None, **settings: object) -> Rig:
        family, usual = FORMS[form]
        target = write_tiny_model(tmp_path / "target", family, seed=3)
        return rig_of(target, tmp_path / "assistant", published or usual, SpeculationSettings(**settings))  # type: ignore[arg-type]

    return build


def prompt_of(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 320) for _ in range(length)]


def observe(rig: Rig, *spans: CommittedSpan) -> None:
    with torch.inference_mode():
        rig.speculator.observe(spans)


def drafted(rows: list[Row], budgets: list[int]) -> list[list[int]]:
    with torch.inference_mode():
        draft = rows[0].rig.speculator.propose([row.asks(budget) for row, budget in zip(rows, budgets, strict=True)])
    assert draft.parents is None
    lengths = draft.lengths.tolist()
    return [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), lengths, strict=True)]


def check(rows: list[Row], budgets: list[int]) -> list[list[int]]:
    proposals = drafted(rows, budgets)
    for row, budget, proposal in zip(rows, budgets, proposals, strict=True):
        assert proposal == row.rig.reference(row.history, budget).tokens
    return proposals


@pytest.mark.parametrize("form", FORMS)
def test_drafts_are_those_of_the_assistant_in_float64(make: Make, form: str) -> None:
    """Prompts of all lengths in chunks, then rounds that keep none, some or all of a draft and leave the rest's keys."""
    rig = make(form)
    rows = [Row(number, [*prompt_of(number, length), 9], rig) for number, length in enumerate((21, 2, 1))]
    observe(rig, rows[0].chunk(7))
    observe(rig, rows[0].chunk(21), rows[1].chunk(2), rows[2].chunk(1))
    check(rows, [WIDTH, 1, 2])
    for number in range(5):
        proposals = check(rows, [WIDTH] * 3)
        observe(
            rig,
            *(
                row.verify(proposal, (number + row.number) % (WIDTH + 1), 7 + number)
                for row, proposal in zip(rows, proposals, strict=True)
            ),
        )
    check(rows, [WIDTH, 2, 1])


def test_different_positions_see_different_keys(make: Make) -> None:
    """What is compared above depends on the keys: with another text before it the same last state drafts otherwise."""
    rig = make("plain")
    row = Row(0, [*prompt_of(0, 21), 9], rig)
    observe(rig, row.chunk(21))
    [before] = drafted([row], [WIDTH])
    rig.pool.keys.mul_(-1)
    [after] = drafted([row], [WIDTH])
    assert before != after


def test_drawn_tokens_come_with_what_they_were_drawn_from(make: Make) -> None:
    for form in ("plain", "clusters"):
        rig = make(form, draft_sampling="sampled")
        greedy = Row(0, [*prompt_of(0, 9), 5], rig)
        drawing = Row(1, [*prompt_of(1, 12), 6], rig, params=SAMPLED)
        observe(rig, greedy.chunk(9), drawing.chunk(12))
        with torch.inference_mode():
            draft = rig.speculator.propose([greedy.asks(WIDTH), drawing.asks(WIDTH)])
        assert draft.probs is not None
        tokens = draft.tokens.tolist()
        assert tokens[0] == rig.reference(greedy.history, WIDTH).tokens
        assert torch.equal(draft.probs[0], torch.nn.functional.one_hot(draft.tokens[0].long(), 320).float())
        told = rig.reference(drawing.history, WIDTH, drawn=tokens[1])
        wanted = (torch.stack(told.logits) / SAMPLED.temperature).softmax(dim=1)
        assert torch.allclose(draft.probs[1].to(torch.float64), wanted, atol=TOLERANCE)
        assert tokens[1] != rig.reference(drawing.history, WIDTH).tokens


def test_a_drafting_assistant_writes_nothing_to_the_targets_pages(make: Make) -> None:
    rig = make("plain")
    rows = [Row(number, [*prompt_of(number, length), 9], rig) for number, length in enumerate((5, 14))]
    spans = [row.chunk(len(row.history) - 1) for row in rows]
    before = rig.pool.keys.clone(), rig.pool.values.clone()
    observe(rig, *spans)
    drafted(rows, [WIDTH, WIDTH])
    assert torch.equal(rig.pool.keys, before[0])
    assert torch.equal(rig.pool.values, before[1])


def test_a_span_that_is_told_twice_changes_nothing(make: Make) -> None:
    """As when another row's span raised: then all are told again, one by one."""
    rig = make("plain")
    rows = [Row(number, [*prompt_of(number, 6), 9], rig) for number in range(2)]
    spans = [row.chunk(6) for row in rows]
    observe(rig, *spans)
    observe(rig, spans[0])
    observe(rig, spans[1])
    check(rows, [WIDTH] * 2)


def test_a_row_begins_with_nothing_of_the_one_before(make: Make) -> None:
    rig = make("plain")
    row = Row(0, [*prompt_of(0, 6), 9], rig)
    observe(rig, row.chunk(6))
    rig.speculator.end(0)
    with pytest.raises(ValueError, match="row 0 has position 5 behind it; observed was -1"):
        drafted([row], [1])


def test_rows_beyond_the_context_run_without_drafts(make: Make) -> None:
    """A round stands at one position, so the last one the assistant knows may draft a whole round."""
    rig = make("plain", PublishedAssistant(context_length=12))
    inside, beyond = (Row(number, [*prompt_of(number, length), 9], rig) for number, length in enumerate((11, 12)))
    observe(rig, inside.chunk(11), beyond.chunk(12))
    assert [len(proposal) for proposal in drafted([inside, beyond], [WIDTH] * 2)] == [WIDTH, 0]
    assert drafted([beyond], [WIDTH]) == [[]]
    check([inside], [WIDTH])


def test_no_rows_are_legal(make: Make) -> None:
    for settings in ({}, {"draft_sampling": "sampled"}):
        speculator = make("plain", **settings).speculator
        draft = speculator.propose([])
        assert draft.tokens.shape == (0, WIDTH)
        assert (draft.probs is not None) == bool(settings)
        speculator.observe([])
