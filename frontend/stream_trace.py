"""The engine's stages of one traced prompt, made from what rides in the engine's own outputs.

Owns which engine span exists, when it begins and ends, whose child it is. All of it comes from `SequenceOutput` (events,
rounds) and `StepOutput` (phases); the engine is asked for nothing. Never encodes or sends. Made by
`frontend.request_trace`, fed by `frontend.attachment`. Table of spans: docs/observability.md.
"""

from dataclasses import dataclass, field

from frontend.spans import (
    Attributes,
    Resource,
    RoundParent,
    RoundRecord,
    Sampled,
    SpanEvent,
    SpanKind,
    SpanRecord,
    Surroundings,
    TraceLevel,
    end_of_step,
    new_span_id,
)
from protocol.messages import Event, EventKind, Finish, Hello, Phase, PhaseTimes, Round, SequenceOutput, StepOutput
from protocol.reasons import FinishReason


@dataclass(frozen=True, slots=True)
class EngineClock:
    """One engine as a trace sees it. Its times are its own monotonic clock's; one offset serves a whole request."""

    resource: Resource
    offset_ns: int
    hello: Hello


@dataclass(slots=True)
class _Totals:
    """Of one child's rounds, for its decode_forward."""

    rounds: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    correct_drafts: int = 0
    cut: int = 0

    def add(self, round_: Round) -> None:
        self.rounds += 1
        self.correct_drafts += round_.accepted
        self.cut += round_.cut
        if round_.drafted:
            self.drafts += 1
            self.draft_tokens += round_.drafted


@dataclass(slots=True)
class _Child:
    """One sequence. Engine times in ns of the engine's clock; None until it got there."""

    queued_ns: int | None = None
    scheduled_ns: int | None = None
    prefilled_ns: int | None = None  # end of the step that ended the prompt
    chunk_end_ns: int | None = None
    prefill_id: bytes | None = None
    decode: RoundParent | None = None
    spans_per_round: tuple[int, int] = (0, 0)
    decoded: tuple[int, PhaseTimes] | None = None  # step of the last round: its start, its phases
    cached_tokens: int | None = None
    totals: _Totals = field(default_factory=_Totals)
    num_tokens: int = 0
    kept: int | None = None
    events: list[SpanEvent] = field(default_factory=list)
    is_over: bool = False


class StreamTrace:
    """One submitted prompt: the engine's stages of each of its children. Fed by the engine client, output by output.

    Every child ends exactly once: by its last output, or by the loss of the engine.
    """

    def __init__(self, around: Surroundings, sampled: Sampled, server_id: bytes, engine: EngineClock) -> None:
        self.level = sampled.level
        self._around = around
        self._sampled = sampled
        self._server_id = server_id
        self._engine = engine
        self._children: dict[int, _Child] = {}

    # ---- what the engine client says ----

    def record(self, step: StepOutput, output: SequenceOutput, is_last: bool) -> None:
        """One output, in order. `is_last`: the child owes nothing more."""
        child = self._child(output.index)
        if child.is_over:
            return
        if output.events:
            for event in output.events:
                self._on_event(child, event, step)
        child.num_tokens += len(output.token_ids)
        round_ = output.round
        if round_ is not None:
            self._on_round(child, step, round_)
        elif output.token_ids or output.prompt is not None:
            self._on_first_token(child, output, step)
        if is_last:
            # The step that carries the last word ran after what it tells: its start is when the engine knew.
            self._end(output.index, child, max(step.started_ns, _decoded_ns(child)), _error_of(output.finish))

    def closing(self, index: int, kept: int) -> None:
        """The frontend closes a child of which so many tokens belong to the answer."""
        self._child(index).kept = kept

    def lost(self, reason: str) -> None:
        """The engine is gone: whatever is open ends now, in error."""
        now_ns = self._around.wall_ns() - self._engine.offset_ns
        for index, child in self._children.items():
            if not child.is_over:
                self._end(index, child, now_ns, f"engine lost: {reason}")

    # ---- stages ----

    def _child(self, index: int) -> _Child:
        child = self._children.get(index)
        if child is None:
            child = self._children[index] = _Child()
        return child

    def _on_event(self, child: _Child, event: Event, step: StepOutput) -> None:
        if event.kind is EventKind.RECEIVED:
            child.queued_ns = event.at_ns  # until QUEUED says better
        elif event.kind is EventKind.QUEUED:
            if child.queued_ns is not None and self.level >= TraceLevel.ROUNDS:
                self._put("request_process", new_span_id(), self._server_id, child.queued_ns, event.at_ns)
            child.queued_ns = event.at_ns
        elif event.kind is EventKind.SCHEDULED:
            self._on_scheduled(child, event)
        elif event.kind is EventKind.RETRACTED:
            child.events.append(SpanEvent("retract", self._unix(event.at_ns)))
        elif event.kind is EventKind.CHUNK:
            self._on_chunk(child, event, step)

    def _on_scheduled(self, child: _Child, event: Event) -> None:
        if child.scheduled_ns is None:
            child.scheduled_ns = event.at_ns
            child.prefill_id = new_span_id()
            queued_ns = event.at_ns if child.queued_ns is None else child.queued_ns
            self._put("prefill_waiting", new_span_id(), self._server_id, queued_ns, event.at_ns)
        if self.level >= TraceLevel.STEPS:
            child.events.append(SpanEvent("schedule", self._unix(event.at_ns)))

    def _on_chunk(self, child: _Child, event: Event, step: StepOutput) -> None:
        if child.prefilled_ns is not None:
            return  # computed again after a preemption: the prompt's own work is over
        begun_ns = step.started_ns + step.phases.spans[Phase.VERIFY][0]
        child.chunk_end_ns = step.started_ns + end_of_step(step.phases)
        if self.level >= TraceLevel.STEPS and child.prefill_id is not None:
            attributes = (("num_tokens", event.num_tokens),)
            self._put("chunked_prefill", new_span_id(), child.prefill_id, begun_ns, child.chunk_end_ns, attributes)

    def _on_first_token(self, child: _Child, output: SequenceOutput, step: StepOutput) -> None:
        if output.prompt is not None:
            child.cached_tokens = output.prompt.num_cached_tokens
        if child.prefilled_ns is None:
            self._end_prefill(output.index, child, step.started_ns + end_of_step(step.phases), None)

    def _on_round(self, child: _Child, step: StepOutput, round_: Round) -> None:
        decode = child.decode
        if decode is None:
            decode = child.decode = self._begin_decode(child, step)
            child.spans_per_round = decode.spans_per_round
        if self.level >= TraceLevel.ROUNDS:
            num_spans = child.spans_per_round[round_.drafted > 0]
            if num_spans:
                self._around.sink.put(
                    RoundRecord(decode, child.totals.rounds, step.started_ns, step.phases, round_, num_spans)
                )
        child.totals.add(round_)
        child.decoded = (step.started_ns, step.phases)

    def _begin_decode(self, child: _Child, step: StepOutput) -> RoundParent:
        if child.prefilled_ns is None:
            # A prompt that gave no token (a script): it was over with its last chunk.
            ended_ns = step.started_ns if child.chunk_end_ns is None else child.chunk_end_ns
            self._end_prefill(self._index_of(child), child, ended_ns, None)
        return self._new_decode()

    def _new_decode(self) -> RoundParent:
        hello = self._engine.hello
        return RoundParent(
            resource=self._engine.resource,
            trace=self._sampled.trace,
            span_id=new_span_id(),
            offset_ns=self._engine.offset_ns,
            sources=hello.sources,
            level=self.level,
            speculates=hello.max_draft_len > 0,
        )

    def _end_prefill(self, index: int, child: _Child, ended_ns: int, error: str | None) -> None:
        child.prefilled_ns = ended_ns
        if child.prefill_id is None or child.scheduled_ns is None:
            return
        attributes: Attributes = _index_attribute(index)
        if child.cached_tokens is not None:
            attributes += (("num_cached_tokens", child.cached_tokens),)
        events, child.events = tuple(child.events), []
        self._put(
            "prefill_forward",
            child.prefill_id,
            self._server_id,
            child.scheduled_ns,
            ended_ns,
            attributes,
            events,
            error,
        )

    def _end(self, index: int, child: _Child, ended_ns: int, error: str | None) -> None:
        """Close whatever the child left open."""
        child.is_over = True
        if child.scheduled_ns is None:
            if child.queued_ns is not None:
                self._put("prefill_waiting", new_span_id(), self._server_id, child.queued_ns, ended_ns, error=error)
        elif child.prefilled_ns is None:
            self._end_prefill(index, child, ended_ns, error)
        elif child.decode is None and error is not None:
            child.decode = (
                self._new_decode()
            )  # broken off before its first round: the error belongs to what it waited for
        if child.decode is not None and child.prefilled_ns is not None:
            attributes = _index_attribute(index) + _decode_attributes(child)
            ended_ns = max(_decoded_ns(child), ended_ns if error is not None else 0)
            events = tuple(child.events)
            self._put(
                "decode_forward",
                child.decode.span_id,
                self._server_id,
                child.prefilled_ns,
                ended_ns,
                attributes,
                events,
                error,
            )

    def _index_of(self, wanted: _Child) -> int:
        return next(index for index, child in self._children.items() if child is wanted)

    def _unix(self, engine_ns: int) -> int:
        return engine_ns + self._engine.offset_ns

    def _put(
        self,
        name: str,
        span_id: bytes,
        parent_id: bytes,
        begun_ns: int,
        ended_ns: int,
        attributes: Attributes = (),
        events: tuple[SpanEvent, ...] = (),
        error: str | None = None,
    ) -> None:
        self._around.sink.put(
            SpanRecord(
                resource=self._engine.resource,
                trace=self._sampled.trace,
                span_id=span_id,
                parent_id=parent_id,
                name=name,
                kind=SpanKind.INTERNAL,
                start_ns=self._unix(begun_ns),
                end_ns=self._unix(max(begun_ns, ended_ns)),
                attributes=attributes,
                events=events,
                error=error,
            )
        )


def _decoded_ns(child: _Child) -> int:
    """When its last round was over; 0 without one. Asked once, so that a round costs only a reference."""
    return 0 if child.decoded is None else child.decoded[0] + end_of_step(child.decoded[1])


def _index_attribute(index: int) -> Attributes:
    """The children of n are told apart; a request with one child needs no number."""
    return (("index", index),) if index else ()


def _decode_attributes(child: _Child) -> Attributes:
    totals = child.totals
    trimmed = 0 if child.kept is None else max(child.num_tokens - child.kept, 0)
    return (
        ("num_rounds", totals.rounds),
        ("num_drafts", totals.drafts),
        ("num_draft_tokens", totals.draft_tokens),
        ("num_correct_drafts", totals.correct_drafts),
        ("num_cut_tokens", totals.cut),
        ("num_trimmed_tokens", trimmed),
        ("clock", "device" if child.decoded is not None and child.decoded[1].on_device else "host"),
    )


def _error_of(finish: Finish | None) -> str | None:
    """Why a child did not end by itself; None when it did."""
    if finish is None or finish.reason not in (FinishReason.ABORT, FinishReason.ERROR):
        return None
    return finish.message or finish.reason.label
