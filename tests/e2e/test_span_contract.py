"""Every drafter leaves true spans: as many as there were rounds, with the counts that the counters and the answers have.

The drafters are the registry's table, the oracles and a drafter of trees: a new one is tested by existing. The engine is the
real one over a small model; its published steps go through the real attachment into the bytes a collector would get.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from engine.clock import HostClock
from engine.speculation.draft import Draft, host_draft
from engine.speculation.oracle import OracleSpeculator
from engine.speculation.speculator import Capabilities, DraftRow, Speculator
from frontend.attachment import Attachment, Expectation
from frontend.request_trace import RequestTrace
from frontend.spans import Resource, Sampled, Surroundings, Trace, TraceLevel
from frontend.spec_stats import SpecStats
from frontend.streams import Stream
from frontend.trace_context import new_trace_id
from protocol.messages import Close, EventKind, Hello, StepOutput, Submit
from protocol.reasons import FinishReason
from tests import traced, wiring
from tests.inprocess import FRONTEND, Drafter, InProcessEngine
from tests.lossless import SCENARIOS, VOCAB, Plain, Scenario, oracle_drafter, play, registered_drafters
from tests.tiny import write_tiny_model
from tests.traced import ListSink, Span, named, total

OFFSET_NS = 1_700_000_000_000_000_000  # between the engine's clock and unix time
PARENT = b"\5" * 8


@dataclass
class Traced:
    """One submitted request, as its frontend follows it."""

    trace: RequestTrace
    stream: Stream
    submit: Submit


class Follower:
    """A frontend without sockets: real attachment and streams, traces into a list."""

    def __init__(self, hello: Hello, level: TraceLevel) -> None:
        self.sink = ListSink()
        self.level = level
        self.requests: dict[int, Traced] = {}
        self.closes: list[Close] = []
        resource = Resource((("service.name", traced.FRONTEND),))
        engine = Resource(
            (("service.name", traced.ENGINE), ("service.instance.id", f"{hello.engine_id}/{hello.epoch}"))
        )
        self._around = Surroundings(self.sink, resource, lambda engine_id, epoch: engine)
        self.attachment = Attachment(lambda message: None, Expectation(None, None))
        self.attachment.apply(hello)

    def follow(self, submit: Submit) -> Submit:
        """The traced form of `submit`; its outputs are recorded from now on."""
        sampled = Sampled(Trace(new_trace_id(), "vendor=1"), PARENT, self.level)
        trace = RequestTrace(self._around, sampled, "POST /v1/completions")
        with trace.stage("tokenize", TraceLevel.STAGES):
            pass
        part = self.attachment.trace_of(trace)
        stream = Stream(
            submit.request_id, submit.n, awaits_close=submit.awaits_close, send_close=self._send_close, trace=part
        )
        self.attachment.streams[submit.request_id] = stream
        self.requests[submit.request_id] = Traced(trace, stream, submit)
        return msgspec.structs.replace(submit, trace_level=int(self.level), received_ns=1)

    def end(self) -> None:
        for one in self.requests.values():
            one.trace.end()

    def spans_of(self, request_id: int) -> list[Span]:
        trace_id = self.requests[request_id].trace.trace_id
        return [span for span in self.sink.spans() if span.trace_id == trace_id]

    def _send_close(self, request_id: int, index: int, reason: object, kept: int) -> None:
        self.closes.append(Close(request_id, index, reason, kept))  # type: ignore[arg-type]


def hello_of(engine: InProcessEngine) -> Hello:
    capabilities = engine.capabilities
    return wiring.hello(
        max_draft_len=capabilities.max_draft_len, sources=capabilities.sources, monotonic_ns=0, wall_ns=OFFSET_NS
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, vocab_size=VOCAB)
    return directory


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain(model)


def run(model: Path, drafter: Drafter, scenario: Scenario, level: TraceLevel) -> tuple[InProcessEngine, Follower]:
    """Play the scenario with every request traced, and follow what was published."""
    engine = InProcessEngine(model, scenario.shape, drafter)
    engine.executor._inner.clock = HostClock(engine._core._now_ns)  # one clock for steps and phases
    follower = Follower(hello_of(engine), level)
    waves = tuple(tuple(follower.follow(one) for one in wave) for wave in scenario.waves)
    play(engine, Scenario(scenario.shape, waves, scenario.steps_between, scenario.departures))
    for number, step in enumerate(published(engine), start=1):
        follower.attachment.apply(msgspec.structs.replace(step, step_id=number, epoch=wiring.EPOCH))
    follower.end()
    return engine, follower


def published(engine: InProcessEngine) -> list[StepOutput]:
    return [step[FRONTEND] for step in engine.publisher.steps]


class TreeOracle(Speculator):
    """At every depth a wrong node and behind it the right one, as far as the budget goes: the smallest drafter of trees."""

    def __init__(self, truths: OracleSpeculator, width: int) -> None:
        self.capabilities = Capabilities(width, ("tree",), tree=True, drafts_on_host=True)
        self._truths = truths

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        width = self.capabilities.max_draft_len
        nodes: list[list[int]] = []
        parents = torch.full((len(rows), width), -1, dtype=torch.int32)
        for index, row in enumerate(rows):
            drafted: list[int] = []
            above = -1
            for token in self._truths._continuation(row):
                for sibling in ((token + 1) % VOCAB, token):
                    if len(drafted) < min(row.budget, width):
                        parents[index, len(drafted)] = above
                        drafted.append(sibling)
                above = len(drafted) - 1
            nodes.append(drafted)
        return dataclasses.replace(host_draft(nodes, width), parents=parents)


class Mute(Speculator):
    """Configured and silent: every round is plain, and each still leaves its spec_verify."""

    capabilities = Capabilities(max_draft_len=4, sources=("mute",), drafts_on_host=True)

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        return host_draft([[] for _ in rows], 4)


def drafter_of(label: str, scenario: Scenario, plain: Plain) -> Drafter:
    if label == "mute":
        return Drafter(label, oracle=Mute())
    if label in ("right", "wrong", "tree"):
        oracle = oracle_drafter(scenario, plain, is_right=label != "wrong")
        if label == "tree":
            assert isinstance(oracle.oracle, OracleSpeculator)
            return Drafter(label, oracle=TreeOracle(oracle.oracle, 6))
        return oracle
    return next(one for one in registered_drafters() if one.label == label)


LABELS = [*(one.label for one in registered_drafters()), "right", "wrong", "tree", "mute"]
RUNS = [(label, "mixed") for label in LABELS] + [
    (label, scenario)
    for label in ("ngram", "right", "tree")
    for scenario in ("chunked", "preempted", "abandoned", "several")
]


@pytest.mark.parametrize(("label", "name"), RUNS)
def test_every_drafter_leaves_as_many_true_spans_as_rounds(label: str, name: str, model: Path, plain: Plain):
    scenario = SCENARIOS[name](plain)
    engine, follower = run(model, drafter_of(label, scenario, plain), scenario, TraceLevel.STEPS)
    spans, counters = follower.sink.spans(), engine.counters
    assert len(spans) == follower.sink.num_spans
    for request_id, request in follower.requests.items():
        own = follower.spans_of(request_id)
        [server] = [span for span in own if span.span_id == request.trace.span_id.hex()]
        assert server.parent_id == PARENT.hex() and {span.state for span in own} == {"vendor=1"}
        traced.check_trace([span for span in own if span is not server], server.span_id, level=3)
        check_ends(own, request)
    rounds = counters.draft_rounds + counters.plain_rounds
    speculates = engine.capabilities.max_draft_len > 0
    assert len(named(spans, "spec_draft")) == counters.draft_rounds
    assert len(named(spans, "spec_verify")) == (rounds if speculates else 0)
    assert len(named(spans, "decode_loop")) == rounds > 0
    assert total(spans, "spec_draft", "num_draft_tokens") == counters.draft_tokens
    assert total(spans, "spec_verify", "num_correct_drafts") == counters.accepted_tokens
    assert total(spans, "decode_forward", "num_cut_tokens") == counters.cut_tokens
    assert sum(event == "retract" for span in spans for event in span.events) == counters.num_preemptions
    assert {span.attributes["source"] for span in named(spans, "spec_draft")} <= set(engine.capabilities.sources)
    for counter in SCENARIOS[name](plain).must_rise:
        assert getattr(counters, counter) > 0
    check_answers(follower, engine)


def check_ends(own: Sequence[Span], request: Traced) -> None:
    """One waiting and one prefill per child; a decode span for whoever decoded; errors only where a child was ended."""
    assert len(named(own, "request_process")) == 1
    children = request.submit.n
    assert len(named(own, "prefill_waiting")) == children
    assert len(named(own, "prefill_forward")) <= children
    for waiting in named(own, "prefill_waiting"):
        assert waiting.is_error or any(span.start_ns == waiting.end_ns for span in named(own, "prefill_forward"))
    assert {span.attributes.get("index", 0) for span in named(own, "decode_forward")} <= set(range(children))


def check_answers(follower: Follower, engine: InProcessEngine) -> None:
    """The statistics that a client would be told are those of its spans."""
    outputs = engine.outputs()
    for (request_id, child), listed in outputs.items():
        stats = SpecStats(max(engine.capabilities.max_draft_len, 1), detailed=True)
        for output in listed:
            if output.round is not None:
                stats.add(output.round)
        report = stats.report()
        decode = [
            span
            for span in named(follower.spans_of(request_id), "decode_forward")
            if span.attributes.get("index", 0) == child
        ]
        if decode:
            assert decode[0].attributes["num_drafts"] == report["num_spec_steps"]
            assert decode[0].attributes["num_draft_tokens"] == report["num_draft_tokens"]
            assert decode[0].attributes["num_correct_drafts"] == report["num_accepted_draft_tokens"]
        else:
            assert report["num_spec_steps"] == 0


@pytest.mark.parametrize("level", [TraceLevel.STAGES, TraceLevel.ROUNDS])
def test_a_lower_level_leaves_out_what_is_above_it_and_nothing_else(level: TraceLevel, model: Path, plain: Plain):
    scenario = SCENARIOS["mixed"](plain)
    drafter = drafter_of("ngram", scenario, plain)
    _, full = run(model, drafter, scenario, TraceLevel.STEPS)
    _, less = run(model, drafter, scenario, level)
    for request_id in full.requests:
        kept = [span.name for span in full.spans_of(request_id) if traced.TABLE.get(span.name, (1,))[0] <= level]
        assert sorted(kept) == sorted(span.name for span in less.spans_of(request_id))


def test_the_last_round_of_an_aborted_request_has_its_span_with_the_times_of_its_own_step(model: Path, plain: Plain):
    scenario = SCENARIOS["abandoned"](plain)
    engine, follower = run(model, drafter_of("ngram", scenario, plain), scenario, TraceLevel.ROUNDS)
    assert engine.counters.aborted_rounds > 0
    steps = published(engine)
    aborted = 0
    for number, step in enumerate(steps):
        for output in step.outputs:
            if output.round is None or not output.round.aborted:
                continue
            aborted += 1
            ran = steps[number - 1]
            last = named(follower.spans_of(output.request_id), "spec_verify")[-1]
            assert last.start_ns == OFFSET_NS + ran.started_ns + ran.phases.spans[2][0]
            assert last.attributes == {"num_correct_drafts": output.round.accepted}
    assert aborted == engine.counters.aborted_rounds


def test_an_aborted_request_says_so_on_what_was_open(model: Path, plain: Plain):
    scenario = SCENARIOS["abandoned"](plain)
    engine, follower = run(model, drafter_of("ngram", scenario, plain), scenario, TraceLevel.ROUNDS)
    ended = {
        child: output.finish.reason
        for child, outputs in engine.outputs().items()
        for output in outputs
        if output.finish is not None
    }
    assert FinishReason.ABORT in ended.values() and FinishReason.LENGTH in ended.values()
    for (request_id, _), reason in ended.items():
        spans = [
            s
            for s in follower.spans_of(request_id)
            if s.name in ("prefill_waiting", "prefill_forward", "decode_forward")
        ]
        assert any(span.is_error for span in spans) == (reason is FinishReason.ABORT), (reason, spans)


def test_a_lost_engine_ends_every_open_span_in_error(model: Path, plain: Plain):
    scenario = SCENARIOS["mixed"](plain)
    engine = InProcessEngine(model, scenario.shape, drafter_of("ngram", scenario, plain))
    follower = Follower(hello_of(engine), TraceLevel.ROUNDS)
    for one in scenario.submits[:8]:
        engine.submit(follower.follow(one))
    for _ in range(6):
        engine.step()
    for number, step in enumerate(published(engine), start=1):
        follower.attachment.apply(msgspec.structs.replace(step, step_id=number, epoch=wiring.EPOCH))
    open_before = set(follower.attachment.streams)
    follower.attachment.end("the connection was closed")
    follower.end()
    assert len(open_before) >= 4
    for request_id in open_before:
        spans = follower.spans_of(request_id)
        [broken] = [span for span in spans if span.is_error]
        assert broken.message == "engine lost: the connection was closed"
        assert broken.name in ("prefill_waiting", "prefill_forward", "decode_forward")
        assert {span.parent_id for span in spans} <= {PARENT.hex(), *(span.span_id for span in spans)}


def test_an_untraced_request_leaves_nothing_in_the_engine_and_nothing_in_the_frontend(model: Path, plain: Plain):
    scenario = SCENARIOS["abandoned"](plain)
    engine = InProcessEngine(model, scenario.shape, drafter_of("ngram", scenario, plain))
    play(engine, scenario)
    outputs = [output for step in published(engine) for output in step.outputs]
    assert outputs and all(output.events == () for output in outputs)
    # an output per token run, first token or end: none for an event alone
    assert all(output.token_ids or output.round or output.prompt or output.finish for output in outputs)


def test_a_traced_request_tells_its_events_in_order(model: Path, plain: Plain):
    scenario = SCENARIOS["preempted"](plain)
    engine, _ = run(model, drafter_of("ngram", scenario, plain), scenario, TraceLevel.STEPS)
    for outputs in engine.outputs().values():
        events = [event for output in outputs for event in output.events]
        assert [event.kind for event in events][:3] == [EventKind.RECEIVED, EventKind.QUEUED, EventKind.SCHEDULED]
        assert sorted(event.at_ns for event in events) == [event.at_ns for event in events]
        kinds = [event.kind for event in events]
        assert kinds.count(EventKind.SCHEDULED) == kinds.count(EventKind.RETRACTED) + 1
