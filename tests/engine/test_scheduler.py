"""Who runs: the queue, chunks, budgets, preemption, forks, limits. Over the strict FakeExecutor."""

import msgspec
import pytest

from engine.intake import PolicySettings
from engine.plan import SpanKind
from engine.sequence import Gone
from protocol.messages import Capacity, Detach, Finish, SimScript
from protocol.reasons import FinishReason, RejectReason
from protocol.sampling import SamplingParams
from tests.fakes import Engine, plain_tokens, submit


def kinds(engine: Engine, step: int) -> list[tuple[SpanKind, int]]:
    return [(span.kind, len(span.token_ids)) for span in engine.fake.plans[step].spans]


def only_finish(engine: Engine, request_id: int, child: int = 0) -> Finish:
    (finish,) = engine.finishes(request_id, child)
    assert isinstance(finish, Finish)
    return finish


def test_long_prompts_come_in_chunks_behind_the_rounds() -> None:
    engine = Engine(max_num_batched_tokens=16, max_num_seqs=4)
    engine.submit(1, range(10, 14), max_tokens=30)
    engine.step()
    engine.submit(2, range(10, 60), max_tokens=3)
    engine.step()
    first, second = kinds(engine, 1)
    assert first == (SpanKind.ROUND, 1)
    assert second[0] is SpanKind.CHUNK and 8 <= second[1] <= 15
    engine.run_dry()
    for plan in engine.fake.plans:
        assert sum(len(span.token_ids) + span.budget for span in plan.spans) <= 16
    assert engine.tokens(2) == plain_tokens(range(10, 60), 2, 3)
    assert engine.counters.prompt_tokens == 54 and engine.counters.first_tokens == 2


def test_drafts_never_starve_waiting_prompts() -> None:
    engine = Engine(max_num_batched_tokens=10, max_num_seqs=5, max_draft_len=8)
    for request_id in range(4):
        engine.submit(request_id, (10, 11), max_tokens=60)
    engine.step(3)
    engine.submit(9, range(20, 60), max_tokens=1)
    for _ in range(14):
        engine.step()
        assert any(span.kind is not SpanKind.ROUND for span in engine.fake.plans[-1].spans) or engine.finishes(9)
    assert engine.finishes(9)


def test_rows_are_limited_and_the_queue_is_ordered_by_priority_then_arrival() -> None:
    engine = Engine(max_num_seqs=1)
    for request_id, priority in ((1, 0), (2, 5), (3, 5), (4, 1)):
        engine.submit(request_id, priority=priority, max_tokens=3)
    engine.step()
    load = engine.publisher.snapshots[-1].load
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 3, 9)
    engine.run_dry()
    order = [output.request_id for output in engine.publisher.outputs() if output.prompt is not None]
    assert order == [1, 4, 2, 3]


def test_draft_budget_shrinks_towards_max_tokens_and_the_model_length() -> None:
    engine = Engine(max_model_len=12, num_blocks=10)
    engine.submit(1, (10, 11, 12), max_tokens=4)
    engine.submit(2, range(10, 20), max_tokens=50)
    engine.run_dry()
    assert len(engine.tokens(1)) == 4 and len(engine.tokens(2)) == 2
    assert only_finish(engine, 2).reason is FinishReason.LENGTH
    for plan in engine.fake.plans:
        for span in plan.spans:
            assert span.start + 1 + span.budget <= 11 or span.kind is not SpanKind.ROUND


def test_a_parameter_the_drafter_cannot_honour_means_no_draft() -> None:
    engine = Engine(unsupported_sampling=frozenset({"logit_bias"}))
    engine.submit(1, logit_bias={5: 1.0})
    engine.submit(2)
    engine.run_dry()
    budgets: dict[int, set[int]] = {}
    for plan in engine.fake.plans:
        for span in plan.spans:
            budgets.setdefault(span.row, set()).add(span.budget)
    assert budgets[0] == {0} and max(budgets[1]) > 0
    assert engine.counters.plain_rounds >= 7


def test_speculation_never_causes_a_preemption() -> None:
    """Two rows fill 8 blocks to the last slot without drafts; with drafts nobody may be preempted either."""
    engine = Engine(num_blocks=8, block_size=4, max_num_seqs=2, prefix_caching=False)
    engine.submit(1, range(10, 14), max_tokens=12)
    engine.submit(2, range(20, 24), max_tokens=12)
    engine.run_dry()
    assert engine.counters.num_preemptions == 0 and engine.counters.draft_rounds > 0
    assert engine.tokens(1) == plain_tokens(range(10, 14), 1, 12)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_rows_resume_without_losing_or_repeating_a_token(prefix_caching: bool) -> None:
    engine = Engine(num_blocks=12, block_size=4, max_num_seqs=4, prefix_caching=prefix_caching)
    for request_id in range(4):
        engine.submit(request_id, range(10, 15 + request_id), max_tokens=28)
    engine.run_dry()
    counters = engine.counters
    assert counters.num_preemptions > 0
    for request_id in range(4):
        assert engine.tokens(request_id) == plain_tokens(range(10, 15 + request_id), request_id, 28)
    assert counters.prompt_tokens == 5 + 6 + 7 + 8 and counters.first_tokens == 4
    assert counters.generation_tokens == 4 * 28
    recomputed = [s for p in engine.fake.plans for s in p.spans if s.kind is SpanKind.LAST_RECOMPUTE]
    assert len(recomputed) == counters.num_preemptions
    if not prefix_caching:
        assert counters.recomputed_tokens > 0
    assert engine.publisher.snapshots[-1].load.blocks_used == 0


def test_the_latest_of_the_lowest_priority_is_preempted_first() -> None:
    engine = Engine(num_blocks=10, max_num_seqs=3, prefix_caching=False)
    engine.submit(1, range(10, 18), max_tokens=20, priority=1)
    engine.submit(2, range(10, 18), max_tokens=20, priority=0)
    engine.submit(3, range(10, 18), max_tokens=20, priority=1)
    victims: list[int] = []
    engine.ledger.retracted = lambda sequence: victims.append(sequence.key.request_id)  # type: ignore[method-assign]
    engine.run_dry()
    assert victims and victims[0] == 3 and 2 not in victims


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_children_share_the_prompt_and_go_their_own_ways(prefix_caching: bool) -> None:
    engine = Engine(max_num_seqs=8, prefix_caching=prefix_caching)
    prompt = range(10, 29)
    engine.submit(5, prompt, n=4, max_tokens=10, trace_level=0)
    engine.step()
    assert engine.publisher.snapshots[-1].load.waiting == 3, "children wait for child 0"
    engine.step()
    forks = [span for span in engine.fake.plans[1].spans if span.kind is SpanKind.LAST_CHUNK]
    assert [len(span.token_ids) for span in forks] == [3, 3, 3], "only the tail of the prompt is computed again"
    assert len({span.block_ids[:4] for span in forks}) == 1
    engine.run_dry()
    for child in range(4):
        assert engine.tokens(5, child) == plain_tokens(prompt, 5 + child, 10)
    counters = engine.counters
    assert (counters.prompt_tokens, counters.first_tokens, counters.generation_tokens) == (19, 4, 40)
    assert counters.prefix_cache_queries == (19 if prefix_caching else 0)
    assert sum(output.prompt is not None for output in engine.publisher.outputs()) == 1


def test_children_run_on_when_child_0_leaves_before_its_prompt_is_done() -> None:
    engine = Engine(max_num_batched_tokens=8, max_num_seqs=8)
    engine.submit(5, range(10, 40), n=3, max_tokens=4)
    engine.step()
    engine.close(5, 0)
    engine.run_dry()
    assert only_finish(engine, 5, 0).reason is FinishReason.ABORT
    for child in (1, 2):
        assert engine.tokens(5, child) == plain_tokens(range(10, 40), 5 + child, 4)
    assert engine.counters.prompt_tokens == 30


def test_forked_children_that_wait_give_up_their_blocks_before_anyone_is_preempted() -> None:
    engine = Engine(num_blocks=10, block_size=4, max_num_seqs=1, prefix_caching=False)
    engine.submit(5, range(10, 34), n=3, max_tokens=2)
    engine.step(1)
    engine.submit(6, range(40, 68), max_tokens=10, priority=-1)
    while not engine.finishes(5, 0):
        engine.step()
    assert engine.publisher.snapshots[-1].load.blocks_used == 5, "the children hold the prompt they share"
    waiting_tokens = engine.publisher.snapshots[-1].load.waiting_tokens
    engine.step()
    load = engine.publisher.snapshots[-1].load
    assert load.running == 1 and load.waiting_tokens == waiting_tokens - 28 + 2 * 20
    engine.run_dry()
    for child in range(3):
        assert engine.tokens(5, child) == plain_tokens(range(10, 34), 5 + child, 2)
    assert engine.tokens(6) == plain_tokens(range(40, 68), 6, 10)
    assert engine.counters.num_preemptions == 0


def test_children_fork_also_when_child_0_ends_with_its_first_token() -> None:
    engine = Engine(max_num_seqs=4, prefix_caching=False)
    engine.submit(5, range(10, 29), n=3, max_tokens=1)
    engine.run_dry()
    assert [[len(span.token_ids) for span in plan.spans] for plan in engine.fake.plans] == [[19], [3, 3]]
    assert [engine.tokens(5, child) for child in range(3)] == [
        plain_tokens(range(10, 29), 5 + child, 1) for child in range(3)
    ]


def test_an_answer_is_found_in_the_cache_by_the_request_that_continues_it() -> None:
    engine = Engine(block_size=4)
    engine.submit(1, range(10, 18), max_tokens=9)
    engine.run_dry()
    engine.submit(2, [*range(10, 18), *engine.tokens(1), 50], max_tokens=1)
    engine.run_dry()
    assert engine.counters.prefix_cache_hits == 16, "8 of the prompt, 8 of the answer's 9: the last is not computed"


def test_a_growing_row_takes_the_blocks_of_waiting_children_before_it_preempts_itself() -> None:
    engine = Engine(num_blocks=10, block_size=4, max_num_seqs=1, prefix_caching=False)
    engine.submit(5, range(10, 34), n=2, max_tokens=2)
    engine.step()
    engine.submit(6, range(40, 44), max_tokens=30, priority=-1)
    engine.run_dry()
    assert engine.counters.num_preemptions == 0
    assert engine.tokens(6) == plain_tokens(range(40, 44), 6, 30)
    assert engine.tokens(5, 1) == plain_tokens(range(10, 34), 6, 2)


def test_an_admission_leaves_a_block_for_those_who_run() -> None:
    engine = Engine(num_blocks=4, block_size=4, max_num_seqs=2, prefix_caching=False)
    engine.submit(1, range(10, 14), max_tokens=6)
    engine.submit(2, range(20, 32), max_tokens=1)
    engine.step(2)
    load = engine.publisher.snapshots[-1].load
    assert (load.running, load.waiting) == (1, 1), "three free blocks would be gone with its prompt"
    engine.run_dry()
    assert engine.counters.num_preemptions == 0
    assert engine.tokens(2) == plain_tokens(range(20, 32), 2, 1)


@pytest.mark.parametrize(
    ("message", "reason", "words"),
    [
        (submit(1, ()), RejectReason.INVALID, "prompt is empty"),
        (submit(1, (5, -1)), RejectReason.INVALID, "token id -1"),
        (submit(1, (5, 1000)), RejectReason.INVALID, "token id 1000; the vocabulary is 0 to 999"),
        (submit(1, n=0), RejectReason.INVALID, "n must be between 1 and 128, got 0"),
        (submit(1, (5,) * 200), RejectReason.PROMPT_TOO_LONG, "the prompt has 200 tokens"),
        (submit(1, temperature=float("nan")), RejectReason.INVALID, "temperature"),
        (submit(1, logit_bias={1000: 1.0}), RejectReason.INVALID, "logit_bias"),
        (submit(1, sim=SimScript(((5,),))), RejectReason.INVALID, "--executor sim"),
        (submit(1, remaining_ns=0), RejectReason.EXPIRED, "deadline"),
        (
            msgspec.structs.replace(submit(1), scope="s" * 65),
            RejectReason.INVALID,
            "scope has 65 characters; the limit is 64",
        ),
    ],
)
def test_what_cannot_run_is_rejected_with_a_sentence(message: object, reason: RejectReason, words: str) -> None:
    engine = Engine()
    engine.inbox.put(message)
    engine.step()
    finish = only_finish(engine, 1)
    assert finish.reason is FinishReason.ERROR and finish.rejected is reason
    assert finish.message is not None and words in finish.message
    assert engine.ledger.num_open == 0 and engine.counters.prompt_tokens == 0


def test_the_longest_prompt_that_fits_runs() -> None:
    engine = Engine(max_model_len=12)
    engine.submit(1, range(10, 21), max_tokens=5)
    engine.run_dry()
    assert len(engine.tokens(1)) == 1 and only_finish(engine, 1).reason is FinishReason.LENGTH


def test_a_kv_cache_smaller_than_the_context_is_the_limit() -> None:
    engine = Engine(num_blocks=3, block_size=4, max_model_len=200)
    engine.submit(1, range(10, 22))
    engine.submit(2, range(10, 20), max_tokens=50)
    engine.run_dry()
    assert only_finish(engine, 1).rejected is RejectReason.PROMPT_TOO_LONG
    assert len(engine.tokens(2)) == 2 and only_finish(engine, 2).reason is FinishReason.LENGTH


def test_queue_limits_count_only_those_who_wait() -> None:
    engine = Engine(max_num_seqs=2, max_num_queued_requests=1)
    for request_id in range(4):
        engine.submit(request_id)
    engine.step()
    assert only_finish(engine, 3).rejected is RejectReason.QUEUE_FULL
    assert engine.publisher.snapshots[-1].load.waiting == 1
    engine.run_dry()
    assert all(len(engine.tokens(request_id)) == 8 for request_id in range(3))


def test_queued_tokens_are_limited() -> None:
    engine = Engine(max_num_seqs=1, max_num_queued_tokens=10)
    for request_id in range(4):
        engine.submit(request_id, range(10, 16))
        engine.step()
    assert only_finish(engine, 2).rejected is RejectReason.QUEUED_TOKENS_FULL
    engine.run_dry()
    assert len(engine.tokens(1)) == 8


def test_deadlines_reject_who_waits_and_abort_who_runs() -> None:
    engine = Engine(max_num_seqs=1)
    engine.submit(1, max_tokens=100, remaining_ns=10**9)
    engine.submit(2, max_tokens=100, remaining_ns=10**9)
    engine.step(3)
    sent = len(engine.tokens(1))
    engine.clock.advance(2)
    engine.step()
    assert len(engine.tokens(1)) == sent > 0
    running, waiting = only_finish(engine, 1), only_finish(engine, 2)
    assert running.reason is FinishReason.ABORT and running.rejected is None
    assert running.message is not None and "deadline" in running.message
    assert waiting.rejected is RejectReason.EXPIRED
    assert engine.publisher.snapshots[-1].load.blocks_used == 0
    assert engine.scheduler.next_deadline_ns is None


def test_rows_of_a_paused_frontend_stand_still_and_go_on_later() -> None:
    engine = Engine(frontends=("f", "g"))
    engine.submit(1, max_tokens=20)
    engine.submit(2, max_tokens=20, frontend_id="g")
    engine.step(2)
    engine.inbox.paused_frontends = frozenset({"g"})
    engine.submit(3, max_tokens=20, frontend_id="g")
    before = engine.tokens(2, frontend_id="g")
    engine.step(3)
    assert engine.tokens(2, frontend_id="g") == before
    assert engine.publisher.snapshots[-1].load.paused == 1
    engine.inbox.paused_frontends = frozenset()
    engine.run_dry()
    assert engine.tokens(2, frontend_id="g") == plain_tokens((10, 11, 12), 2, 20)
    assert engine.tokens(3, frontend_id="g") == plain_tokens((10, 11, 12), 3, 20)


@pytest.mark.parametrize("message", [Detach(), Gone("g", "silent")])
def test_everything_of_a_frontend_that_left_is_dropped(message: object) -> None:
    engine = Engine(frontends=("f", "g"), max_num_seqs=2)
    engine.submit(1, max_tokens=20)
    engine.submit(2, n=3, max_tokens=20, frontend_id="g")
    engine.step(2)
    engine.inbox.put(message, "g")
    engine.step()
    assert engine.publisher.steps[-1]["g"].outputs == ()
    assert engine.ledger.num_open == 1
    engine.run_dry()
    assert engine.tokens(1) == plain_tokens((10, 11, 12), 1, 20)


def test_a_draining_engine_takes_nothing_new() -> None:
    engine = Engine()
    engine.scheduler.is_draining = True
    engine.submit(1)
    engine.step()
    assert only_finish(engine, 1).rejected is RejectReason.DRAINING
    assert engine.publisher.snapshots[-1].load.draining


def test_settings_that_cannot_run_are_refused() -> None:
    capacity = Capacity(100, 64, 32, 16, 10, 10, 10, True)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(32\) must be at least max_num_seqs \(64\)"):
        PolicySettings(capacity, 5, 100, frozenset())
    with pytest.raises(ValueError, match="at least 1"):
        PolicySettings(Capacity(100, 0, 32, 16, 10, 10, 10, True), 5, 100, frozenset())


def test_rows_change_hands_exactly_once_per_life() -> None:
    engine = Engine(num_blocks=10, max_num_seqs=3)
    for request_id in range(6):
        engine.submit(request_id, range(10, 20), max_tokens=18)
    engine.run_dry()
    engine.step()  # tells the executor of the last ends
    begins = sum(len(plan.begins) for plan in engine.fake.plans)
    ends = sum(len(plan.ends) for plan in engine.fake.plans)
    assert begins == ends == 6 + engine.counters.num_preemptions
    assert engine.fake.rows == {}


def test_what_a_row_committed_is_told_even_when_it_ends_with_it() -> None:
    """The next plan has the commit before the end: the row's blocks are in the prefix cache already."""
    engine = Engine(max_num_seqs=1)
    engine.submit(1, range(10, 20), max_tokens=1)
    engine.submit(2, range(30, 40), max_tokens=3)
    engine.run_dry()
    engine.step()
    told = [(plan.commits, plan.ends, plan.begins) for plan in engine.fake.plans if plan.ends]
    assert len(told) == 2
    commits, ends, begins = told[0]
    assert [commit.row for commit in commits] == list(ends) == [begin.row for begin in begins] == [0]
    assert (commits[0].num_computed, len(commits[0].token_ids)) == (10, 1)
    assert told[1][0][0].num_computed == 12, "the last token has no keys"


def test_prompt_logprobs_are_asked_of_the_first_life_of_child_0_only() -> None:
    engine = Engine()
    engine.submit(1, range(10, 19), n=2, prompt_logprobs=2)
    engine.run_dry()
    asked = [begin.sampling.prompt_logprobs for plan in engine.fake.plans for begin in plan.begins]
    assert asked == [2, None]
    assert SamplingParams(max_tokens=1).prompt_logprobs is None
