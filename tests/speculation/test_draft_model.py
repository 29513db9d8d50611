"""What a draft model computes: each committed token once, at the right place, with nothing left of rejected ones."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.accept import accept
from engine.model.decoder import DecoderModel
from engine.sampling import SamplingModel, SamplingRows, SamplingState
from engine.speculation.speculator import SequenceStart
from protocol.sampling import SamplingParams
from tests.speculation.draft_rows import BLOCK_SIZE, Drafted, Row, load, random_prompt
from tests.speculation.reference import HOST, ToyTarget
from tests.tiny import tiny_config, tiny_weights, write_tiny_model

CLOSE = 1e-3  # float32 in another batch shape; keys of another token differ by about 1
SEVEN_SIGMA = 7.0  # exceeded by chance once in about 10**11


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return load(write_tiny_model(tmp_path_factory.mktemp("draft") / "model", "qwen3", seed=3))


def proposed(drafted: Drafted, row: Row, budget: int = 4) -> list[int]:
    draft = drafted.speculator.propose([row.asks(budget)])
    return draft.tokens[0, : int(draft.lengths[0])].tolist()


def assert_keys_are_those_from_scratch(drafted: Drafted, row: Row, num_positions: int) -> None:
    """Keys and values of committed positions equal those of a row that was told all of it at once."""
    fresh = Drafted(drafted.speculator._model)
    twin = Row(row.number, [*row.history, 0])  # what follows does not matter
    twin.block_ids = row.block_ids
    twin.begin(fresh)
    fresh.speculator.observe([twin.span(num_positions)])
    if num_positions == 1:
        fresh.speculator.observe([])  # a single token waits for one call
    difference = (fresh.keys(row, num_positions) - drafted.keys(row, num_positions)).abs().amax()
    assert float(difference) < CLOSE


def test_a_draft_is_the_models_own_greedy_continuation(model) -> None:
    drafted, row = Drafted(model), Row(0, random_prompt(1, 9))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(17)])
    tokens = proposed(drafted, row)
    for _ in range(4):
        fresh, longer = Drafted(model), Row(0, row.history)
        longer.begin(fresh)
        fresh.speculator.observe([longer.span(len(row.history) - 1)])
        following = proposed(fresh, longer, 1)
        assert following == tokens[:1]
        row.history, tokens = [*row.history, *following], tokens[1:]
    assert tokens == []


@pytest.mark.parametrize("num_accepted", range(5))
def test_keys_after_a_round_are_those_of_what_was_committed(model, num_accepted: int) -> None:
    """Whatever was rejected, and although the last token of a draft that was accepted whole had not been fed."""
    drafted, rows = Drafted(model), [Row(0, random_prompt(2, 6)), Row(1, random_prompt(3, 11))]
    for row in rows:
        row.begin(drafted)
    drafted.speculator.observe([row.prompt(20 + row.number) for row in rows])
    for _ in range(3):
        draft = drafted.speculator.propose([row.asks() for row in rows])
        accepted = draft.tokens[:, :num_accepted].tolist()
        drafted.speculator.observe(
            [row.commit(tokens, own=30 + row.number) for row, tokens in zip(rows, accepted, strict=True)]
        )
        for row in rows:
            ready = len(row.history) - 1 - (num_accepted == 4)
            assert_keys_are_those_from_scratch(drafted, row, ready)
    drafted.speculator.propose([row.asks() for row in rows])
    for row in rows:
        assert_keys_are_those_from_scratch(drafted, row, len(row.history))


@pytest.mark.parametrize("num_accepted", range(5))
def test_no_committed_token_is_computed_twice(model, num_accepted: int) -> None:
    """A round costs as many forwards as it drafts, whatever was accepted before: 4 here, and one for the prompt."""
    drafted, row = Drafted(model), Row(0, random_prompt(4, 10))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(9)])
    rounds = 5
    for _ in range(rounds):
        tokens = proposed(drafted, row)
        drafted.speculator.observe([row.commit(tokens[:num_accepted], own=40)])
    assert len(drafted.slots) == 1 + 4 * rounds
    times = Counter(slot for slots in drafted.slots for slot in slots)
    last_root = row.num_prompt + (rounds - 1) * (num_accepted + 1)
    if num_accepted >= 3:  # nothing that was drafted and fed is ever rejected
        assert {times[position] for position in range(last_root + 4)} == {1}
    else:  # a rejected position is computed again, once for every draft that reached it
        assert all(times[position] == 1 for position in range(row.num_prompt + 1))


def test_a_token_that_waits_is_fed_with_the_next_root_or_by_the_next_call(model) -> None:
    drafted, row = Drafted(model), Row(0, random_prompt(5, 8))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(7)])
    drafted.speculator.observe([row.commit(proposed(drafted, row), own=8)])
    drafted.slots.clear()
    proposed(drafted, row)
    assert drafted.slots[0] == [12, 13]  # the draft's last token, and the root
    drafted.speculator.observe([row.commit(proposed(drafted, row), own=8)])
    drafted.slots.clear()
    drafted.speculator.observe([row.commit((), own=9)])  # a round without a draft
    assert drafted.slots == [[17, 18]]
    drafted.speculator.observe([row.commit((), own=9)])
    drafted.slots.clear()
    drafted.speculator.observe([])  # the row did nothing this time
    assert drafted.slots == [[19]]
    assert_keys_are_those_from_scratch(drafted, row, len(row.history) - 1)


def test_full_blocks_of_a_row_that_ends_have_all_their_keys(model) -> None:
    """They stay findable: whoever shares them computes nothing there."""
    drafted, row = Drafted(model), Row(0, random_prompt(6, 11))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(7)])
    drafted.speculator.observe([row.commit(proposed(drafted, row), own=8)])
    assert (len(row.history) - 1) % BLOCK_SIZE == 0  # the token that waits closes a block
    drafted.speculator.end(row.number)
    assert_keys_are_those_from_scratch(drafted, row, len(row.history) - 1)
    drafted.slots.clear()
    heir = Row(1, [*row.history, 5])
    heir.block_ids = (*row.block_ids[:4], *heir.block_ids)
    heir.computed = 16
    heir.begin(drafted)
    drafted.speculator.observe([heir.span(17)])
    drafted.speculator.propose([heir.asks()])
    assert_keys_are_those_from_scratch(drafted, heir, 18)


def test_nothing_is_computed_for_a_row_that_ends_in_an_open_block(model) -> None:
    drafted, row = Drafted(model), Row(0, random_prompt(6, 9))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(7)])
    drafted.speculator.observe([row.commit(proposed(drafted, row), own=8)])
    drafted.slots.clear()
    drafted.speculator.end(row.number)
    drafted.speculator.observe([])
    assert drafted.slots == []


def test_chunks_give_the_keys_of_the_whole_prompt(model) -> None:
    drafted, row = Drafted(model), Row(0, random_prompt(7, 21))
    row.begin(drafted)
    for end in (1, 2, 9, 13, 20):
        drafted.speculator.observe([row.span(end)])
    row.history.append(6)
    drafted.speculator.observe([row.span(21)])
    drafted.speculator.propose([row.asks()])
    assert_keys_are_those_from_scratch(drafted, row, 22)


def test_rows_draft_together_as_they_do_alone(model) -> None:
    """Whatever their lengths and budgets; and no slot outside a row's blocks, or behind its budget, is written."""
    drafted, rows = Drafted(model), [Row(number, random_prompt(10 + number, 3 + 9 * number)) for number in range(4)]
    for row in rows:
        row.begin(drafted)
    drafted.speculator.observe([row.prompt(11) for row in rows])
    budgets = [2, 4, 1, 3]
    drafted.slots.clear()
    together = drafted.speculator.propose([row.asks(budget) for row, budget in zip(rows, budgets, strict=True)])
    assert together.lengths.tolist() == budgets and together.num_forwards == 4
    written = sorted(slot for slots in drafted.slots for slot in slots)
    expected = [
        drafted.pool.slot(row.block_ids, len(row.history) - 1 + step)
        for row, budget in zip(rows, budgets, strict=True)
        for step in range(budget)
    ]
    assert written == sorted(expected)
    for index, (row, budget) in enumerate(zip(rows, budgets, strict=True)):
        alone, twin = Drafted(model), Row(row.number, row.history)
        twin.begin(alone)
        alone.speculator.observe([twin.span(len(row.history) - 1)])
        assert together.tokens[index, :budget].tolist() == proposed(alone, twin, budget)


def test_asking_again_for_the_same_root_gives_the_same_draft(model) -> None:
    """A step that failed is repeated row by row."""
    drafted, row = Drafted(model), Row(0, random_prompt(8, 7))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(7)])
    first = proposed(drafted, row)
    assert proposed(drafted, row) == first
    drafted.speculator.observe([row.commit(first[:2], own=3)])
    assert_keys_are_those_from_scratch(drafted, row, len(row.history) - 1)


def test_a_call_that_failed_may_be_repeated_row_by_row(model, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted, rows = Drafted(model), [Row(0, random_prompt(9, 6)), Row(1, random_prompt(10, 7))]
    for row in rows:
        row.begin(drafted)
    spans = [row.prompt(7) for row in rows]
    with monkeypatch.context() as patch:
        patch.setattr(drafted.speculator._model, "forward", _raise)
        with pytest.raises(RuntimeError, match="out of memory"):
            drafted.speculator.observe(spans)
    for span in spans:
        drafted.speculator.observe([span])
    for row in rows:
        assert_keys_are_those_from_scratch(drafted, row, row.num_prompt)


def _raise(*arguments: object) -> None:
    raise RuntimeError("out of memory")


def test_what_an_earlier_owner_left_in_the_blocks_changes_nothing(model) -> None:
    """Even NaN, which a mask alone does not keep out."""
    clean, haunted = Drafted(model), Drafted(model)
    haunted.pool.keys.fill_(torch.nan)
    haunted.pool.values.fill_(torch.nan)
    drafts = []
    for drafted in (clean, haunted):
        rows = [Row(0, random_prompt(11, 5)), Row(1, random_prompt(12, 14))]
        for row in rows:
            row.begin(drafted)
        drafted.speculator.observe([row.prompt(7) for row in rows])
        for _ in range(3):
            draft = drafted.speculator.propose([row.asks() for row in rows])
            drafts.append(draft.tokens.tolist())
            kept = draft.tokens.tolist()
            drafted.speculator.observe([row.commit(tokens, own=3) for row, tokens in zip(rows, kept, strict=True)])
    assert drafts[:3] == drafts[3:]


def test_a_new_sequence_in_a_row_starts_anew(model) -> None:
    drafted, first = Drafted(model), Row(0, random_prompt(13, 9))
    first.begin(drafted)
    drafted.speculator.observe([first.prompt(5)])
    proposed(drafted, first)
    drafted.speculator.end(0)
    drafted.speculator.end(0)  # a row that never drafted, or ended before
    second = Row(0, random_prompt(14, 6))
    drafted.speculator.begin(SequenceStart(0, second.history, 6))
    with pytest.raises(ValueError, match="row 0 drafts before anything of it was committed"):
        drafted.speculator.propose([second.asks()])
    drafted.speculator.observe([second.prompt(5)])
    assert_keys_are_those_from_scratch(drafted, second, 6)


def test_no_token_is_fed_beyond_the_draft_models_context(tmp_path: Path) -> None:
    drafted = Drafted(load(write_tiny_model(tmp_path / "short", context_length=14)))
    row = Row(0, random_prompt(15, 10))
    row.begin(drafted)
    drafted.speculator.observe([row.prompt(4)])
    lengths = []
    while len(row.history) < 22:
        draft = drafted.speculator.propose([row.asks()])
        lengths.append(int(draft.lengths[0]))
        drafted.speculator.observe([row.commit(draft.tokens[0, : min(1, lengths[-1])].tolist(), own=4)])
    drafted.speculator.end(0)
    assert lengths == [4, 2, *[0] * 7]  # positions 10..13, then 12..13
    assert max(slot for slots in drafted.slots for slot in slots) == 13


def test_greedy_traffic_pays_for_no_probabilities(model) -> None:
    drafted = Drafted(model, gives_probs=True)
    rows = [Row(0, [5, 6, 7]), Row(1, [8, 9], SamplingParams(max_tokens=99, temperature=1.0))]
    for row in rows:
        row.begin(drafted)
    drafted.speculator.observe([row.prompt(4) for row in rows])
    assert drafted.speculator.propose([rows[0].asks()]).probs is None
    draft = drafted.speculator.propose([row.asks(3) for row in rows])
    assert draft.probs is not None and draft.probs.dtype == torch.float32
    assert draft.probs.shape == (2, 4, 320)
    assert torch.equal(draft.probs[0, :3].argmax(dim=1), draft.tokens[0, :3].long())
    assert float(draft.probs[0, :3].amax(dim=1).min()) == 1.0
    assert torch.allclose(draft.probs[1, :3].sum(dim=1), torch.ones(3), atol=1e-5)


def test_no_rows_are_legal(model) -> None:
    draft = Drafted(model).speculator.propose([])
    assert draft.tokens.shape == (0, 4)


def test_sampled_drafts_leave_the_targets_law(tmp_path: Path) -> None:
    """Two tokens of 2000 sequences: drafted with probabilities kept, judged, completed, and counted."""
    vocab_size, num_rows = 6, 2000
    model = _bare_model(tmp_path, vocab_size)
    target = ToyTarget(vocab_size, seed=2, order=1, scale=1.0)
    params = SamplingParams(max_tokens=99, temperature=0.8, top_k=5)
    drafted = Drafted(model, width=2, gives_probs=True, num_blocks=num_rows)
    rows = [Row(number, [1, 2], params) for number in range(num_rows)]
    for row in rows:
        row.block_ids = (row.number,)
        row.begin(drafted)
    drafted.speculator.observe([row.prompt(3) for row in rows])
    draft = drafted.speculator.propose([row.asks(1) for row in rows])
    sampling = SamplingModel(vocab_size, (), HOST)
    states = [SamplingState(params, 100 + row.number, row.history, 2, sampling) for row in rows]
    logits = torch.cat([target.verify(row.history, [int(draft.tokens[row.number, 0])]) for row in rows])
    verdict = accept(logits, draft, SamplingRows.build(states, [2] * num_rows, HOST))
    accepted = int(verdict.accepted.sum())
    assert 0.2 * num_rows < accepted < 0.9 * num_rows  # both rules were at work
    first, second = _law(target, 3, params), [_law(target, token, params) for token in range(vocab_size)]
    counts = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for tokens, kept in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True):
        if kept:
            counts[tokens[0], tokens[1]] += 1
        else:
            counts[tokens[0]] += second[tokens[0]]  # what plain decoding would make of it
    expected = torch.stack([first[token] * second[token] for token in range(vocab_size)])
    spread = (expected * (1 - expected) / num_rows).sqrt()
    assert torch.equal(expected > 0, counts > 0)
    assert float(((counts / num_rows - expected).abs() / spread.clamp(min=1e-12)).max()) < SEVEN_SIGMA


def _bare_model(directory: Path, vocab_size: int) -> DecoderModel:
    """One layer over a vocabulary that no tokenizer has."""
    config = tiny_config("llama", vocab_size, 1, 64, tied=False)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, 4), str(directory / "model.safetensors"))
    return load(directory)


def _law(target: ToyTarget, last: int, params: SamplingParams) -> torch.Tensor:
    """Float64 [V]: temperature and top_k by hand."""
    scaled = (target.logits([last]).double() / params.temperature).tolist()
    kept = sorted(scaled, reverse=True)[: params.top_k]
    weights = [math.exp(value) if value >= kept[-1] else 0.0 for value in scaled]
    return torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
