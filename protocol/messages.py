"""Every message on the wire between engine and frontends, as msgspec Structs.

Data only: no sockets, no behaviour. All are frozen and array_like; new fields go at the end, with a default. Times are
integer nanoseconds of the sender's monotonic clock unless named otherwise.
"""

from enum import IntEnum

import msgspec

from protocol.reasons import CloseReason, DetachReason, FinishReason, RejectReason
from protocol.sampling import SamplingParams

SCHEMA_VERSION = 3


class _Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


# ---- data inside messages ----


class SimScript(_Wire, frozen=True):
    """What a simulated engine does for one request (`sim` in the request body); other executors refuse it.

    The prompt emits no token. Each list of `runs` is one verify step: the last id is the bonus, those before it are
    accepted drafts. After the last list the request ends as by an EOS without a token.
    """

    runs: tuple[tuple[int, ...], ...]
    drafted: tuple[int, ...] | None = None  # real draft tokens per step; default len(run) - 1
    fail_at: int | None = None  # step (0-based, rounds of this request) at which execution raises
    preempt_at: int | None = None  # step whose result is dropped because the sequence is preempted in flight
    step_ms: float | None = None


class TokenLogprobs(_Wire, frozen=True):
    """Natural-log probabilities of the untransformed target distribution at one position."""

    logprob: float  # of the token that was chosen
    rank: int  # 1 = most likely
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Round(_Wire, frozen=True):
    """One verify of one sequence: the only source of counters, spans, statistics and logs."""

    drafted: int  # d: real draft tokens verified, no padding, no root
    depth: int  # of the draft; equals `drafted` for chains
    accepted: int
    non_draft: int  # tokens of the target's own: 1 (UNO: 2)
    cut: int  # accepted + non_draft - committed
    source: int  # index into Hello.sources
    aborted: bool  # the request was closed while the round ran: counted, nothing committed


class EventKind(IntEnum):
    QUEUED = 0
    SCHEDULED = 1
    RETRACTED = 2  # preempted; will be recomputed
    CHUNK = 3  # one chunk of the prompt was computed
    RECEIVED = 4  # the Submit reached the engine; QUEUED follows when the step thread takes it


class Event(_Wire, frozen=True):
    kind: EventKind
    at_ns: int
    num_tokens: int = 0


class PromptReport(_Wire, frozen=True):
    """Sent once per request, with the output that ends its prompt."""

    num_tokens: int
    num_cached_tokens: int
    queued_ns: int
    scheduled_ns: int
    logprobs: tuple[TokenLogprobs | None, ...] | None  # first entry None; only when asked for


class Finish(_Wire, frozen=True):
    """How one child ended. `message` is for the client, and set for ERROR and rejections only."""

    reason: FinishReason
    stop_token_id: int | None = None  # the stop_token_ids entry that matched; None for EOS
    message: str | None = None
    rejected: RejectReason | None = None


class SequenceOutput(_Wire, frozen=True):
    """What one step did for one child of one request. `first_index` counts the child's earlier tokens."""

    request_id: int
    index: int  # child, 0..n-1
    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt: PromptReport | None
    round: Round | None
    events: tuple[Event, ...]
    finish: Finish | None


class Phase(IntEnum):
    OBSERVE = 0
    DRAFT = 1
    VERIFY = 2
    ACCEPT = 3


class PhaseTimes(_Wire, frozen=True):
    """(start, end) per `Phase` in ns since `StepOutput.started_ns`; (0, 0) for a phase that did not run."""

    spans: tuple[tuple[int, int], ...]
    on_device: bool  # measured by device events, else by the host clock


class StepOutcome(IntEnum):
    OK = 0
    EMPTY = 1
    FAILED = 2


class Load(_Wire, frozen=True):
    """Gauges: what the engine is doing right now."""

    running: int
    waiting: int
    waiting_tokens: int
    blocks_used: int  # held by live sequences; cached but unreferenced blocks count as free
    blocks_total: int
    frontends: int
    paused: int  # rows held back because their frontend is behind
    draining: bool
    reporter: str = ""  # frontend_id of the longest attached frontend: the one that exports the engine's totals by OTLP


class Capacity(_Wire, frozen=True):
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    max_num_queued_requests: int
    max_num_queued_tokens: int
    prefix_caching: bool


# ---- frontend -> engine ----


class Attach(_Wire, frozen=True, tag=1):
    frontend_id: str
    schema: int


class Submit(_Wire, frozen=True, tag=2):
    """Run one request. `request_id` is unique within its frontend's attachment."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int
    remaining_ns: int | None  # time left until the client's deadline
    priority: int  # lower first
    trace_level: int  # 0: untraced
    awaits_close: bool  # the frontend looks for stop strings: children stay open until it closes them
    sim: SimScript | None
    received_ns: int = 0  # set by the engine's wire, for traced requests: its own monotonic clock
    scope: str = ""  # whose text it is: what a drafter learns in one scope drafts in no other
    prediction_token_ids: tuple[int, ...] = ()  # what the client expects as the answer; a hint, never output by itself


class Close(_Wire, frozen=True, tag=3):
    """End a child (or, with index -1, all). `kept` of the child's tokens reached the client. Idempotent."""

    request_id: int
    index: int
    reason: CloseReason
    kept: int  # meaningful for STOP_STRING and DELIVERED


class Ping(_Wire, frozen=True, tag=4):
    """Sign of life, and acknowledgement of every step up to `applied_step`.

    `num_sent` tells the engine of a message that never arrived: without it the client of a lost Submit waits for ever.
    """

    applied_step: int
    num_sent: int | None = None  # messages before this one but Attach and Ping; None: the frontend does not count


class Fence(_Wire, frozen=True, tag=5):
    nonce: int


class Detach(_Wire, frozen=True, tag=6):
    """The frontend leaves: everything it submitted is aborted."""


class ProfileAction(IntEnum):
    START = 0
    STOP = 1


class Profile(_Wire, frozen=True, tag=7):
    """Begin or end a profile of the engine's steps; answered by `ProfileReply`."""

    nonce: int
    action: ProfileAction


FromFrontend = Attach | Submit | Close | Ping | Fence | Detach | Profile

# ---- engine -> frontend ----


class Hello(_Wire, frozen=True, tag=1):
    """The answer to Attach: what this engine is, and its totals so far."""

    engine_id: str
    epoch: int  # wall-clock ns at which this engine process started: greater after every restart
    schema: int
    model_name: str
    vocab_size: int
    vocabulary_hash: str
    capacity: Capacity
    speculator: str
    max_draft_len: int  # W; 0 without a speculator
    sources: tuple[str, ...]  # names of draft sources, by index
    executor: str  # "model" or "sim"
    dtype: str
    device: str
    step_id: int  # of the last published step; the first step is 1
    counters: msgspec.Raw
    load: Load
    monotonic_ns: int  # the same instant on the engine's two clocks
    wall_ns: int
    synthetic: str = ""  # rates by position at which drafts stay whatever the target says; "": the target decides


class StepOutput(_Wire, frozen=True, tag=2):
    """One step, for one frontend. Every field is required: a step without counters cannot be built."""

    engine_id: str
    epoch: int
    step_id: int  # gapless within an epoch
    started_ns: int
    outcome: StepOutcome
    phases: PhaseTimes
    counters: msgspec.Raw
    load: Load
    outputs: tuple[SequenceOutput, ...]


class Heartbeat(_Wire, frozen=True, tag=3):
    """Not a step: repeats the last step's id and counters while nothing happens."""

    engine_id: str
    epoch: int
    step_id: int
    counters: msgspec.Raw
    load: Load
    monotonic_ns: int
    wall_ns: int


class FenceReply(_Wire, frozen=True, tag=4):
    engine_id: str
    epoch: int
    nonce: int
    step_id: int
    counters: msgspec.Raw
    load: Load


class Detached(_Wire, frozen=True, tag=5):
    """The engine refuses or cuts off this frontend; nothing more comes until it attaches again."""

    engine_id: str
    epoch: int
    reason: DetachReason


class ProfileOutcome(IntEnum):
    DONE = 0
    REFUSED = 1  # this engine never profiles
    CONFLICT = 2  # not now: one is running already, or none is
    FAILED = 3


class ProfileReply(_Wire, frozen=True, tag=6):
    """The answer to one `Profile`. Requests are never harmed, whatever the outcome."""

    engine_id: str
    epoch: int
    nonce: int
    outcome: ProfileOutcome
    message: str  # a sentence for the admin
    path: str | None = None  # of the trace, on the engine's machine; only of a profile that ended
    num_steps: int = 0  # with rows, that the trace holds


FromEngine = Hello | StepOutput | Heartbeat | FenceReply | Detached | ProfileReply
