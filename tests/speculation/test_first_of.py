"""Drafters in an order: the first with something to say drafts a row, all hear everything, and what comes out is one Draft."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from engine.kv.pool import KVShape
from engine.speculation.draft import Draft, host_draft
from engine.speculation.first_of import FirstOfSpeculator
from engine.speculation.first_of_recipe import FirstOfRecipe, combined
from engine.speculation.recipe import Ready, SpeculationSettings
from engine.speculation.speculator import Capabilities, CommittedSpan, DraftRow, SequenceStart, Speculator
from protocol.sampling import SamplingParams
from tests.speculation.on_host import recipe_of, speculator_on_host

VOCAB = 8
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
HOST = Capabilities(max_draft_len=4, sources=("host",), drafts_on_host=True)
DEVICE = Capabilities(max_draft_len=4, sources=("device",))

Says = Callable[[DraftRow], Sequence[int]]


class Told(Speculator):
    """Says what it is told to say, and remembers what it hears."""

    def __init__(self, capabilities: Capabilities, says: Says = lambda row: ()) -> None:
        self.capabilities = capabilities
        self.says = says
        self.asked: list[list[DraftRow]] = []
        self.heard: list[list[CommittedSpan]] = []
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.fails_on: int | None = None

    def begin(self, start: SequenceStart) -> None:
        self.begun.append(start.row)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        self.asked.append(list(rows))
        draft = host_draft([self.says(row) for row in rows], self.capabilities.max_draft_len)
        return replace(draft, num_forwards=0 if self.capabilities.drafts_on_host else 3)

    def observe(self, spans: Sequence[CommittedSpan]) -> None:
        if any(span.row == self.fails_on for span in spans):
            raise ArithmeticError(f"row {self.fails_on}")
        self.heard.append(list(spans))

    def end(self, row: int) -> None:
        self.ended.append(row)
        if row == self.fails_on:
            raise ArithmeticError("cannot forget")


def first_of(*members: Speculator) -> FirstOfSpeculator:
    together = combined({str(number): member.capabilities for number, member in enumerate(members)})
    return FirstOfSpeculator(members, together, VOCAB)


def rows(count: int, budget: int = 4, sampling: SamplingParams = GREEDY) -> list[DraftRow]:
    return [DraftRow(row, (1, 2), budget, 1, sampling) for row in range(count)]


def spans(count: int, taps: torch.Tensor | None = None) -> list[CommittedSpan]:
    return [CommittedSpan(row, 0, (1, 2), 3, (0,), taps) for row in range(count)]


def proposals(draft: Draft) -> list[list[int]]:
    pairs = zip(draft.tokens.tolist(), draft.lengths.tolist(), strict=True)
    return [tokens[:length] for tokens, length in pairs]


def says_for(*wanted: int) -> Says:
    return lambda row: [row.row + 1] * row.budget if row.row in wanted else ()


# ---- who drafts ----


def test_each_row_is_drafted_for_by_the_first_with_something_to_say() -> None:
    first, second, third = Told(HOST, says_for(1)), Told(DEVICE, says_for(0, 1, 3)), Told(HOST, says_for(0, 1, 2, 3))
    second.capabilities = replace(DEVICE, sources=("x", "device"))
    speculator = first_of(first, second, third)
    draft = speculator.propose(rows(5, budget=2))
    assert proposals(draft) == [[1, 1], [2, 2], [3, 3], [4, 4], []]
    assert [speculator.capabilities.sources[source] for source in draft.sources.tolist()[:4]] == [
        "x",
        "host",
        "host",
        "x",
    ]
    assert [[row.row for row in asked] for asked in (first.asked[0], second.asked[0], third.asked[0])] == [
        [0, 1, 2, 3, 4], [0, 2, 3, 4], [2, 4],
    ]  # fmt: skip
    assert draft.num_forwards == 3
    assert draft.parents is draft.probs is draft.roots is None


def test_who_is_not_needed_is_not_asked() -> None:
    first, second = Told(HOST, says_for(0, 1)), Told(DEVICE, says_for(0))
    draft = first_of(first, second).propose(rows(2))
    assert second.asked == [] and draft.num_forwards == 0


@pytest.mark.parametrize("count", [0, 3])
def test_nothing_to_say_is_a_draft_of_length_zero(count: int) -> None:
    device = Told(DEVICE)
    draft = first_of(Told(replace(HOST, max_draft_len=7)), device).propose(rows(count))
    assert draft.tokens.shape == (count, 7) and draft.lengths.tolist() == [0] * count
    assert draft.num_forwards == 3 * bool(count)  # what it looked at in vain is counted


def test_a_member_is_asked_for_no_more_than_it_can() -> None:
    short, long = (
        Told(replace(HOST, max_draft_len=2), says_for(0)),
        Told(replace(HOST, max_draft_len=6), says_for(0, 1)),
    )
    draft = first_of(short, long).propose(rows(2, budget=6))
    assert draft.tokens.shape == (2, 6)
    assert proposals(draft) == [[1, 1], [2] * 6]


def test_a_row_that_one_member_cannot_serve_is_left_to_the_others() -> None:
    picky = Told(replace(HOST, sources=("picky",), unsupported_sampling=frozenset({"logprobs", "top_k"})), says_for(0))
    other = Told(replace(HOST, unsupported_sampling=frozenset({"top_k", "seed"})), says_for(0))
    speculator = first_of(picky, other)
    assert speculator.capabilities.unsupported_sampling == {"top_k"}
    asks_logprobs = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1)
    assert speculator.propose(rows(1)).sources.tolist() == [0]
    assert speculator.propose(rows(1, sampling=asks_logprobs)).sources.tolist() == [1]
    assert speculator.propose(rows(1, sampling=SamplingParams(max_tokens=9, seed=3))).sources.tolist() == [0]
    picky.says = says_for()
    assert proposals(speculator.propose(rows(1, sampling=SamplingParams(max_tokens=9, seed=3)))) == [[]]


# ---- one draft of several ----


def drawn(width: int) -> Callable[[Sequence[DraftRow]], Draft]:
    def propose(asked: Sequence[DraftRow]) -> Draft:
        probs = torch.full((len(asked), width, VOCAB), 1 / VOCAB)
        return host_draft([[5] * min(row.budget, width) if row.row == 1 else () for row in asked], width, probs)

    return propose


def test_beside_drawn_tokens_a_deterministic_draft_has_all_mass_on_its_tokens() -> None:
    certain = Told(replace(HOST, max_draft_len=3), says_for(0))
    draws = Told(replace(HOST, max_draft_len=2, gives_probs=True))
    draws.propose = drawn(2)  # type: ignore[method-assign]
    speculator = first_of(certain, draws)
    assert speculator.capabilities.gives_probs
    draft = speculator.propose(rows(3, budget=3))
    assert proposals(draft) == [[1, 1, 1], [5, 5], []]
    assert draft.probs is not None and draft.probs.shape == (3, 3, VOCAB) and draft.probs.dtype == torch.float32
    assert draft.probs[0, :3].tolist() == [torch.eye(VOCAB)[1].tolist()] * 3
    assert torch.equal(draft.probs[1, :2], torch.full((2, VOCAB), 1 / VOCAB))


def test_the_rule_for_a_deterministic_draft_does_not_depend_on_its_neighbours() -> None:
    """Else a seeded answer would depend on who else is in the batch."""
    certain, draws = Told(HOST, says_for(0)), Told(replace(HOST, gives_probs=True))
    draws.propose = drawn(4)  # type: ignore[method-assign]
    alone = first_of(certain, draws).propose(rows(1))
    beside = first_of(certain, draws).propose(rows(2))
    assert alone.probs is not None and beside.probs is not None
    assert torch.equal(alone.probs[0], beside.probs[0])


def test_beside_a_tree_a_chain_is_a_tree() -> None:
    chain, tree = Told(HOST, says_for(0)), Told(replace(HOST, max_draft_len=5, tree=True))

    def propose(asked: Sequence[DraftRow]) -> Draft:
        parents = torch.tensor([[-1, -1, 0, 1, 1]] * len(asked), dtype=torch.int32)
        roots = torch.full((len(asked),), 6, dtype=torch.int32)
        return replace(host_draft([[7, 6, 5, 4, 3]] * len(asked), 5), parents=parents, roots=roots)

    tree.propose = propose  # type: ignore[method-assign]
    draft = first_of(chain, tree).propose(rows(2))
    assert draft.parents is not None and draft.roots is not None
    assert draft.parents[0, :4].tolist() == [-1, 0, 1, 2]
    assert draft.parents[1].tolist() == [-1, -1, 0, 1, 1]
    assert draft.roots.tolist() == [-1, 6]
    assert first_of(chain, Told(replace(HOST, tree=True))).propose(rows(2)).parents is None  # chains only, this time


# ---- who hears what ----


def test_members_on_the_device_hear_all_rows_at_once_and_members_on_the_host_one_by_one() -> None:
    host, device = Told(HOST), Told(DEVICE)
    speculator = first_of(host, device)
    assert not speculator.capabilities.drafts_on_host
    told = spans(3)
    speculator.observe(told)
    assert device.heard == [told]
    assert host.heard == [[span] for span in told]
    assert first_of(Told(HOST), Told(HOST)).capabilities.drafts_on_host


@pytest.mark.parametrize("fails_on", [0, 1, 2])
def test_a_failing_row_fails_alone_and_the_host_hears_nothing_twice(fails_on: int) -> None:
    before, failing, device = Told(HOST), Told(HOST), Told(DEVICE)
    failing.fails_on = fails_on
    speculator = first_of(before, failing, device)
    told = spans(3)
    with pytest.raises(ArithmeticError):
        speculator.observe(told)
    for span in told:  # as the engine does: row by row, to find the guilty one
        if span.row == fails_on:
            with pytest.raises(ArithmeticError):
                speculator.observe([span])
        else:
            speculator.observe([span])
    assert sorted(span.row for heard in before.heard for span in heard) == [0, 1, 2]
    assert sorted(span.row for heard in failing.heard for span in heard) == sorted({0, 1, 2} - {fails_on})
    failing.fails_on = None
    speculator.observe(spans(3))
    assert len(before.heard) == 6


def test_a_failing_device_is_told_again_and_the_host_hears_each_span_once() -> None:
    host, device = Told(HOST), Told(DEVICE)
    device.fails_on = 1
    speculator = first_of(host, device)
    told = spans(3)
    with pytest.raises(ArithmeticError):
        speculator.observe(told)
    speculator.observe([told[0]])
    with pytest.raises(ArithmeticError):
        speculator.observe([told[1]])
    speculator.observe([told[2]])
    assert [span.row for heard in host.heard for span in heard] == [0, 2]


def test_every_member_sees_the_hidden_states_it_asked_for() -> None:
    none, some, others = Told(HOST), Told(replace(DEVICE, taps=(3, 1))), Told(replace(DEVICE, taps=(1, 7)))
    speculator = first_of(none, some, others)
    assert speculator.capabilities.taps == (3, 1, 7)
    states = torch.arange(6.0).reshape(2, 3, 1)  # [tokens, taps, hidden]
    speculator.observe(spans(1, states))
    assert none.heard[0][0].taps is None
    assert some.heard[0][0].taps is not None and torch.equal(some.heard[0][0].taps, states[:, [0, 1]])
    assert others.heard[0][0].taps is not None and torch.equal(others.heard[0][0].taps, states[:, [1, 2]])


def test_rows_begin_and_end_with_every_member_even_when_one_cannot_forget() -> None:
    members = [Told(HOST), Told(DEVICE), Told(HOST)]
    speculator = first_of(*members)
    speculator.begin(SequenceStart(0, (1,), 1))
    speculator.begin(SequenceStart(1, (1,), 1))
    speculator.end(0)
    members[1].fails_on = 1
    with pytest.raises(ArithmeticError):
        speculator.end(1)
    assert all(member.begun == member.ended == [0, 1] for member in members)


# ---- what they are together ----


def test_together_they_need_what_each_needs() -> None:
    one = Capabilities(2, ("a", "b"), taps=(4, 2), lookahead=1)
    other = Capabilities(7, ("b", "c"), tree=True, drafts_on_host=True, taps=(2, 9), lookahead=3)
    together = combined({"one": one, "other": other})
    assert (together.max_draft_len, together.sources, together.taps, together.lookahead) == (
        7, ("a", "b", "c"), (4, 2, 9), 3,
    )  # fmt: skip
    assert (together.tree, together.drafts_on_host, together.gives_probs) == (True, False, False)


def test_memory_is_what_all_of_them_take() -> None:
    shape = KVShape(2, 1, 4, 16, torch.float32)
    recipes = [Ready(Told(HOST)), Ready(Told(DEVICE)), Ready(Told(DEVICE))]
    for recipe, weight_bytes in zip(recipes[1:], (100, 20), strict=True):
        recipe.weight_bytes, recipe.kv_shape = weight_bytes, shape
    together = FirstOfRecipe({str(number): recipe for number, recipe in enumerate(recipes)}, VOCAB)
    assert (together.weight_bytes, together.kv_bytes_per_token) == (120, 2 * shape.bytes_per_token)


def test_trees_beside_drawn_tokens_are_refused_by_name() -> None:
    tree, draws = replace(HOST, tree=True), replace(HOST, gives_probs=True)
    with pytest.raises(ValueError, match=r"suffix drafts trees and draft_model draws .*--draft-sampling greedy"):
        combined({"suffix": tree, "draft_model": draws})
    with pytest.raises(ValueError, match="drafts trees and"):
        FirstOfRecipe({"ngram": Ready(Told(draws)), "eagle": Ready(Told(tree))}, VOCAB)


def test_the_registry_builds_them_in_the_order_that_was_asked_for() -> None:
    settings = SpeculationSettings(lookup_min=1, lookup_max=2)
    for spelled, drafts, source in (
        ("first_of:prediction,ngram", [4, 5], "prediction"),
        ("first_of:ngram,prediction", [2, 1], "ngram"),
    ):
        speculator = speculator_on_host(spelled, settings, VOCAB)
        speculator.begin(SequenceStart(0, [1, 2], 2, prediction=(1, 4, 5)))
        draft = speculator.propose([DraftRow(0, [1, 2, 1], 5, 2, GREEDY)])
        assert proposals(draft) == [drafts]
        assert speculator.capabilities.sources[int(draft.sources[0])] == source
        assert recipe_of(spelled, settings, VOCAB).capabilities == speculator.capabilities


def test_an_option_that_a_member_cannot_work_with_is_refused() -> None:
    with pytest.raises(ValueError, match="--lookup-max"):
        recipe_of("first_of:prediction,ngram", SpeculationSettings(lookup_min=3, lookup_max=2), VOCAB)
