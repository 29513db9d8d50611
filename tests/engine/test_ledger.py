"""The books: section 1 of the telemetry contract, row by row."""

import pytest

from engine.accounts import EngineIdentity, StepEnd
from engine.ledger import NO_PHASES, Ledger, LedgerError
from engine.plan import CHUNK_RESULT, Span, SpanKind, SpanResult, StepPlan, StepResult, failed_result
from engine.sequence import ChildKey, Outcome, Sequence, StopRules
from protocol.codec import decode_counters
from protocol.counters import ConservationError, Counters
from protocol.messages import (
    Close,
    EventKind,
    Finish,
    Load,
    PhaseTimes,
    Round,
    SequenceOutput,
    StepOutcome,
    StepOutput,
    TokenLogprobs,
)
from protocol.reasons import CloseReason, FinishReason, RejectReason
from tests.fakes import EOS, FakeClock, submit

W = 5
LOAD = Load(1, 0, 0, 2, 10, 1, 0, False)
ABORTED = Finish(FinishReason.ABORT)


class Books:
    """A ledger with one prompt of three tokens in row 0, at the start of its rounds."""

    def __init__(self, **options: object) -> None:
        self.clock = FakeClock()
        self.ledger = Ledger(EngineIdentity("0", 7), W, 2, self.clock, check_laws=True)
        self.step_id = 0
        self.sequence = self.open(1, **options)

    def open(self, request_id: int, child: int = 0, max_tokens: int = 50, **options: object) -> Sequence:
        rules = StopRules(frozenset({EOS}), frozenset({77}), 0, max_tokens)
        request = submit(request_id, (5, 6, 7), max_tokens=max_tokens, **options)
        sequence = Sequence(ChildKey("f", request_id, child), request, rules, 0, 0)
        sequence.row = child
        sequence.queued_ns, sequence.scheduled_ns = 100, 200
        self.ledger.open(sequence)
        self.ledger.scheduled(sequence, 0, 0)
        return sequence

    def step(
        self, *rows: tuple[Sequence, SpanKind, SpanResult], closed: frozenset[tuple[str, int, int]] = frozenset()
    ) -> list[SequenceOutput]:
        """One step of these rows; returns what frontend f gets."""
        self.step_id += 1
        spans, sequences = [], {}
        for position, (sequence, kind, _) in enumerate(rows):
            start = len(sequence.token_ids) - 1 if kind is SpanKind.ROUND else 0
            tokens = tuple(sequence.token_ids[start:])
            spans.append(Span(position, start, tokens, kind, 0, ()))
            sequences[position] = sequence
        plan = StepPlan(self.step_id, (), (), (), tuple(spans))
        result = StepResult(tuple(row[2] for row in rows), NO_PHASES, 1, 0)
        self.committed = self.ledger.commit(plan, result, sequences, closed)
        return list(self.publish().outputs)

    def publish(self, refused: int = 0, cut_off: int = 0) -> StepOutput:
        outputs, self.snapshot = self.ledger.close_step(StepEnd(50, 60, LOAD, ["f"], refused, cut_off))
        self.decoded = decode_counters(outputs["f"].counters)
        return outputs["f"]

    @property
    def counters(self) -> Counters:
        return self.decoded


def verify(
    tokens: tuple[int, ...], drafted: int, source: int = 0, depth: int | None = None, **more: object
) -> SpanResult:
    depth = drafted if depth is None else depth
    return SpanResult(drafted, depth, source, len(tokens) - 1, 1, tokens, None, None, None, **more)  # type: ignore[arg-type]


FIRST = SpanResult(0, 0, 0, 0, 1, (100,), None, None, None)


def started(**options: object) -> Books:
    books = Books(**options)
    books.step((books.sequence, SpanKind.LAST_CHUNK, FIRST))
    books.sequence.num_seen = 3
    return books


def test_a_draft_round_counts_drafts_tokens_and_positions() -> None:
    books = started()
    (output,) = books.step((books.sequence, SpanKind.ROUND, verify((1, 3, 4), drafted=5, source=1)))
    assert output.round == Round(5, 5, 2, 1, 0, 1, False)
    assert output.token_ids == (1, 3, 4) and output.first_index == 1 and output.finish is None
    counters = books.counters
    assert (counters.draft_rounds, counters.draft_tokens, counters.accepted_tokens) == (1, 5, 2)
    assert counters.accepted_per_pos == [1, 1, 0, 0, 0] and counters.draft_depth == 5
    assert counters.draft_tokens_by_source == [0, 5] and counters.accepted_tokens_by_source == [0, 2]
    assert (counters.generation_tokens, counters.first_tokens, counters.non_draft_tokens) == (4, 1, 1)


def test_a_round_without_a_draft_is_plain_and_nothing_else() -> None:
    books = started()
    (output,) = books.step((books.sequence, SpanKind.ROUND, verify((1,), drafted=0)))
    assert output.round == Round(0, 0, 0, 1, 0, 0, False)
    counters = books.counters
    assert (counters.plain_rounds, counters.draft_rounds, counters.draft_tokens, counters.non_draft_tokens) == (
        1,
        0,
        0,
        1,
    )


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "kept", "cut"),
    [(50, (1, EOS, 3), 2, 1), (50, (1, 77, 3, 4), 2, 2), (3, (1, 3, 4), 2, 1), (3, (1, 3), 2, 0)],
)
def test_tokens_behind_a_stop_are_cut_after_they_were_counted(
    max_tokens: int, tokens: tuple[int, ...], kept: int, cut: int
) -> None:
    books = started(max_tokens=max_tokens)
    (output,) = books.step((books.sequence, SpanKind.ROUND, verify(tokens, drafted=len(tokens))))
    assert output.round is not None and output.round.cut == cut and output.token_ids == tokens[:kept]
    assert output.finish is not None
    counters = books.counters
    assert counters.accepted_tokens == len(tokens) - 1 and counters.cut_tokens == cut
    assert counters.generation_tokens == 1 + kept and books.ledger.num_open == 0


def test_the_end_of_a_prompt_is_no_round() -> None:
    books = Books()
    (output,) = books.step((books.sequence, SpanKind.LAST_CHUNK, FIRST))
    assert output.round is None and output.token_ids == (100,)
    assert output.prompt is not None and (output.prompt.num_tokens, output.prompt.num_cached_tokens) == (3, 0)
    assert (output.prompt.queued_ns, output.prompt.scheduled_ns) == (100, 200)
    counters = books.counters
    assert counters.draft_rounds + counters.plain_rounds == 0
    assert (counters.prompt_tokens, counters.first_tokens, counters.generation_tokens) == (3, 1, 1)


def test_a_recompute_ends_in_a_plain_round_and_counts_no_prompt_again() -> None:
    books = started()
    books.ledger.retracted(books.sequence)
    (output,) = books.step((books.sequence, SpanKind.LAST_RECOMPUTE, verify((9,), drafted=0)))
    assert output.prompt is None and output.round == Round(0, 0, 0, 1, 0, 0, False)
    counters = books.counters
    assert (counters.num_preemptions, counters.recomputed_tokens, counters.prompt_tokens) == (1, 3, 3)
    assert (counters.first_tokens, counters.plain_rounds, counters.generation_tokens) == (1, 1, 2)


def test_children_share_one_prompt_and_have_a_first_token_each() -> None:
    books = Books(n=2)
    sibling = books.open(1, child=1, n=2)
    outputs = books.step((books.sequence, SpanKind.LAST_CHUNK, FIRST), (sibling, SpanKind.LAST_CHUNK, FIRST))
    assert [output.prompt is not None for output in outputs] == [True, False]
    assert (books.counters.prompt_tokens, books.counters.first_tokens) == (3, 2)


def test_prefix_hits_are_reported_with_the_prompt() -> None:
    books = Books()
    books.ledger.scheduled(books.sequence, 3, 2)
    (output,) = books.step((books.sequence, SpanKind.LAST_CHUNK, FIRST))
    assert output.prompt is not None and output.prompt.num_cached_tokens == 2
    counters = books.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits, counters.prompt_tokens_cached) == (3, 2, 2)


@pytest.mark.parametrize("closed", [("f", 1, 0), ("f", 1, -1)])
def test_a_round_that_ran_while_its_request_was_closed_is_counted_as_aborted(closed: tuple[str, int, int]) -> None:
    books = started()
    outputs = books.step((books.sequence, SpanKind.ROUND, verify((1, 3, 4), drafted=5)), closed=frozenset({closed}))
    assert outputs == [] and books.committed[0].outcome is Outcome.CLOSED
    counters = books.counters
    assert (counters.draft_rounds, counters.accepted_tokens, counters.cut_tokens) == (1, 2, 3)
    assert (counters.aborted_rounds, counters.generation_tokens) == (1, 1)
    assert books.ledger.close("f", Close(1, closed[2], CloseReason.CLIENT_GONE, 0)) == [ChildKey("f", 1, 0)]
    (output,) = books.step()
    assert output.round == Round(5, 5, 2, 1, 3, 0, True) and output.finish == ABORTED and output.token_ids == ()
    assert books.counters.aborted_rounds == 1, "counted once"


@pytest.mark.parametrize(
    "answer",
    [failed_result("broken"), SpanResult(0, 0, 0, 0, 0, (), None, None, None, retracted=True)],
    ids=["failed", "retracted"],
)
def test_a_closed_row_without_a_verdict_is_no_round(answer: SpanResult) -> None:
    books = started()
    books.step((books.sequence, SpanKind.ROUND, answer), closed=frozenset({("f", 1, 0)}))
    counters = books.counters
    assert (counters.draft_rounds, counters.plain_rounds, counters.aborted_rounds) == (0, 0, 0)
    books.ledger.close("f", Close(1, 0, CloseReason.CLIENT_GONE, 0))
    (output,) = books.step()
    assert output.round is None and output.finish == ABORTED


def test_a_prompt_that_ended_while_its_request_was_closed_counts_nothing() -> None:
    books = Books()
    books.step((books.sequence, SpanKind.LAST_CHUNK, FIRST), closed=frozenset({("f", 1, 0)}))
    counters = books.counters
    assert (counters.prompt_tokens, counters.first_tokens, counters.generation_tokens) == (0, 0, 0)


def test_a_failed_row_counts_no_round_and_tells_its_client_why() -> None:
    books = started()
    (output,) = books.step((books.sequence, SpanKind.ROUND, failed_result("the logits are not finite")))
    assert output.finish == Finish(FinishReason.ERROR, message="the logits are not finite") and output.round is None
    counters = books.counters
    assert (counters.steps_failed, counters.draft_rounds, counters.plain_rounds) == (1, 0, 0)
    assert books.ledger.num_open == 0 and not books.committed[0].samples


def test_a_step_with_one_verdict_is_not_a_failed_one() -> None:
    books = started()
    other = books.open(2)
    books.step((books.sequence, SpanKind.ROUND, failed_result("broken")), (other, SpanKind.LAST_CHUNK, FIRST))
    assert (books.counters.steps_failed, books.counters.steps_ok) == (0, 2)


def test_a_result_lost_to_a_preemption_is_no_round() -> None:
    books = started()
    lost = SpanResult(0, 0, 0, 0, 0, (), None, None, None, retracted=True)
    assert books.step((books.sequence, SpanKind.ROUND, lost)) == []
    assert books.committed[0].outcome is Outcome.RETRACTED
    assert books.counters.draft_rounds + books.counters.plain_rounds == 0


def test_a_stop_string_trims_what_came_behind_it() -> None:
    books = started(awaits_close=True)
    books.step((books.sequence, SpanKind.ROUND, verify((1, 3, 4), drafted=3)))
    books.ledger.close("f", Close(1, 0, CloseReason.STOP_STRING, kept=2))
    (output,) = books.step()
    assert output.finish == Finish(FinishReason.STOP) and output.token_ids == () and output.first_index == 4
    counters = books.counters
    assert (counters.generation_tokens, counters.trimmed_tokens) == (4, 2)


@pytest.mark.parametrize(
    ("reason", "kept", "trimmed"), [(CloseReason.DELIVERED, 3, 0), (CloseReason.STOP_STRING, 1, 2)]
)
def test_a_finished_child_whose_frontend_looks_for_stops_waits_for_its_close(
    reason: CloseReason, kept: int, trimmed: int
) -> None:
    books = started(awaits_close=True)
    (output,) = books.step((books.sequence, SpanKind.ROUND, verify((1, EOS), drafted=1)))
    assert output.finish == Finish(FinishReason.STOP) and books.committed[0].outcome is Outcome.FINISHED
    assert books.ledger.num_open == 1
    books.ledger.close("f", Close(1, 0, reason, kept))
    (output,) = books.step()
    assert output.finish == Finish(FinishReason.STOP) and output.token_ids == () and output.first_index == 3
    assert books.counters.trimmed_tokens == trimmed and books.ledger.num_open == 0


@pytest.mark.parametrize("kept", [-5, 99])
def test_a_close_that_claims_nonsense_breaks_no_law(kept: int) -> None:
    books = started(awaits_close=True)
    books.ledger.close("f", Close(1, 0, CloseReason.STOP_STRING, kept))
    books.step()
    assert books.counters.trimmed_tokens in (0, 1)


def test_every_close_is_answered_also_the_second_one() -> None:
    books = started()
    close = Close(1, 0, CloseReason.CLIENT_GONE, 0)
    books.ledger.close("f", close)
    assert books.ledger.close("f", close) == []
    assert books.ledger.close("f", Close(9, -1, CloseReason.CLIENT_GONE, 0)) == []
    outputs = books.step()
    assert [(o.request_id, o.index, o.finish) for o in outputs] == [(1, 0, ABORTED), (1, 0, ABORTED), (9, 0, ABORTED)]


def test_a_close_of_all_ends_every_child() -> None:
    books = Books(n=3)
    for child in (1, 2):
        books.open(1, child, n=3)
    keys = books.ledger.close("f", Close(1, -1, CloseReason.CLIENT_GONE, 0))
    assert keys == [ChildKey("f", 1, child) for child in range(3)]
    assert [output.index for output in books.step()] == [0, 1, 2]


def test_accounts_open_once_and_close_once() -> None:
    books = Books()
    with pytest.raises(LedgerError, match="opened twice"):
        books.ledger.open(books.sequence)
    books.ledger.end(books.sequence.key, ABORTED)
    with pytest.raises(LedgerError, match="closed twice"):
        books.ledger.end(books.sequence.key, ABORTED)
    with pytest.raises(LedgerError, match="closed twice"):
        books.step((books.sequence, SpanKind.ROUND, verify((1,), drafted=0)))


def test_a_rejected_request_gets_one_answer_per_child() -> None:
    books = Books()
    finish = Finish(FinishReason.ERROR, message="no", rejected=RejectReason.QUEUE_FULL)
    books.ledger.reject("f", submit(4, n=3), finish)
    outputs = [output for output in books.step() if output.request_id == 4]
    assert [(o.index, o.finish) for o in outputs] == [(0, finish), (1, finish), (2, finish)]


def test_a_second_submit_under_an_open_id_is_refused_without_touching_the_first() -> None:
    books = started()
    books.ledger.refuse_duplicate("f", submit(1))
    books.step()
    assert books.publish(refused=2, cut_off=1).outputs == ()
    assert (books.counters.refused_messages, books.counters.frontends_cut_off) == (3, 1)
    assert books.ledger.num_open == 1


def test_empty_steps_are_published_with_full_counters() -> None:
    books = started()
    before = books.counters
    books.step_id += 1
    books.ledger.commit(StepPlan(books.step_id, (), (), (), ()), StepResult((), NO_PHASES, 0, 0), {}, frozenset())
    step = books.publish()
    assert step.outcome is StepOutcome.EMPTY and step.step_id == books.step_id
    assert books.counters.steps_empty == 1 and books.counters.generation_tokens == before.generation_tokens
    assert step.counters is books.snapshot.counters, "encoded once for everybody"


def test_phases_are_told_relative_to_the_step() -> None:
    books = started()
    phases = PhaseTimes(((0, 0), (10, 20), (20, 90), (90, 100)), True)
    span = Span(0, 3, (100,), SpanKind.ROUND, 0, ())
    plan = StepPlan(2, (), (), (), (span,))
    books.ledger.commit(plan, StepResult((verify((1,), 0),), phases, 1, 0), {0: books.sequence}, frozenset())
    step = books.publish()
    assert step.phases == PhaseTimes(((0, 0), (20, 30), (30, 100), (100, 110)), True)
    assert books.counters.draft_seconds.count == books.counters.verify_seconds.count == 1
    assert books.counters.observe_seconds.count == 0


def test_logprobs_are_cut_with_their_tokens() -> None:
    books = started(logprobs=0)
    entries = tuple(TokenLogprobs(-float(i), 1, (), ()) for i in range(3))
    answer = SpanResult(2, 2, 0, 2, 1, (1, EOS, 3), None, entries, None)
    (output,) = books.step((books.sequence, SpanKind.ROUND, answer))
    assert output.logprobs == entries[:2]


def test_prompt_logprobs_are_gathered_over_chunks_and_start_again_with_the_prompt() -> None:
    books = Books(prompt_logprobs=1)
    entry = [TokenLogprobs(-float(i), 1, (), ()) for i in range(3)]
    chunk = Span(0, 0, (5, 6), SpanKind.CHUNK, 0, ())
    last = Span(0, 2, (7,), SpanKind.LAST_CHUNK, 0, ())
    rows = {0: books.sequence}
    report = None
    for span, logprobs in ((chunk, (entry[2],)), (chunk, tuple(entry[:2])), (last, ())):
        answer = CHUNK_RESULT if span is chunk else FIRST
        answer = SpanResult(0, 0, 0, 0, answer.non_draft, answer.tokens, None, None, logprobs)
        books.ledger.commit(StepPlan(1, (), (), (), (span,)), StepResult((answer,), NO_PHASES, 1, 0), rows, frozenset())
        for output in books.publish().outputs:
            report = output.prompt
    assert report is not None and report.logprobs == (None, entry[0], entry[1])


def test_events_are_for_traced_requests_only() -> None:
    books = Books()
    traced = books.open(2, trace_level=3)
    outputs = books.step((books.sequence, SpanKind.CHUNK, CHUNK_RESULT), (traced, SpanKind.CHUNK, CHUNK_RESULT))
    (output,) = outputs
    assert output.request_id == 2 and output.token_ids == ()
    assert [event.kind for event in output.events] == [EventKind.QUEUED, EventKind.SCHEDULED, EventKind.CHUNK]
    assert output.events[0].at_ns == 100 and output.events[2].num_tokens == 3
    books.ledger.retracted(traced)
    (output,) = books.step()
    assert [event.kind for event in output.events] == [EventKind.RETRACTED]
    assert books.step() == []


def test_events_of_a_frontend_that_left_reach_nobody_who_comes_under_its_name() -> None:
    books = Books(trace_level=3)
    books.ledger.drop("f")
    assert books.step() == []


def test_frontends_get_their_own_outputs_and_the_same_totals() -> None:
    books = started()
    outputs, snapshot = books.ledger.close_step(StepEnd(0, 0, LOAD, ["f", "g"], 0, 0))
    assert outputs["g"].outputs == () and outputs["g"].counters == outputs["f"].counters == snapshot.counters
    books.ledger.drop("f")
    assert books.ledger.num_open == 0 and books.publish().outputs == ()


def test_broken_books_are_noticed_in_the_step_that_broke_them() -> None:
    books = started()
    with pytest.raises(ConservationError, match="accepted_per_pos"):
        books.step((books.sequence, SpanKind.ROUND, SpanResult(1, 1, 0, 2, 1, (1, 3, 4), None, None, None)))


def test_the_first_snapshot_shows_every_position_at_zero() -> None:
    snapshot = Ledger(EngineIdentity("3", 9), W, 1, FakeClock()).snapshot(LOAD)
    assert (snapshot.engine_id, snapshot.epoch, snapshot.step_id) == ("3", 9, 0)
    assert decode_counters(snapshot.counters) == Counters.zero(W, 1)
