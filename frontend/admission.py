"""How much work this frontend takes on at once.

Owns the totals in flight: sequences and prompt tokens, reserved before the work they bound (a burst that is refused must not
have been tokenised first), and the memory in which log-probabilities wait for their answer, reserved at its most. Never queues: waiting happens in the engine. Called by `frontend.completions`.
With several frontends each has its own totals; the engine's limits are the exact ones.
"""

from types import TracebackType

from frontend.config import FrontendConfig
from frontend.errors import overloaded
from frontend.metrics import FrontendMetrics
from protocol.messages import Capacity


class Admission:
    """Totals of one frontend, and whether it still takes requests."""

    def __init__(self, config: FrontendConfig, metrics: FrontendMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self.is_leaving = False  # not ready any more, and perhaps draining
        self.is_draining = False
        self.sequences = 0
        self.prompt_tokens = 0
        self.logprob_bytes = 0

    def leave(self) -> None:
        """Tell balancers to send no more, by `/ready`, and still serve what they send until they know."""
        self.is_leaving = True

    def drain(self) -> None:
        """From now on refuse every request; those in flight go on."""
        self.is_leaving = self.is_draining = True

    def reserve(self, num_sequences: int, capacity: Capacity) -> "Reservation":
        """A place for a request of so many sequences, given back when its block ends. Raises ApiError(503)."""
        if self.is_draining:
            self._metrics.rejected("draining")
            raise overloaded("this server is shutting down", retry_after_s=5)
        limit = self._config.max_inflight_requests
        if limit is None:
            limit = capacity.max_num_seqs + capacity.max_num_queued_requests
        # A request bigger than the limit must still be possible on an idle server: the engine decides about it.
        if self.sequences and self.sequences + num_sequences > limit:
            self._metrics.rejected("max_num_queued_reqs")
            raise overloaded(f"this server is full: {self.sequences} sequences are in flight, the limit is {limit}")
        return Reservation(self, num_sequences, self._token_limit(capacity))

    def _token_limit(self, capacity: Capacity) -> int:
        if self._config.max_inflight_prompt_tokens is not None:
            return self._config.max_inflight_prompt_tokens
        return capacity.max_num_queued_tokens + capacity.num_blocks * capacity.block_size

    def refuse_tokens(self, num_tokens: int, limit: int) -> None:
        """Raise ApiError(503) if so many more prompt tokens would be too many."""
        if self.prompt_tokens and self.prompt_tokens + num_tokens > limit:
            self._metrics.rejected("max_num_queued_tokens")
            raise overloaded(
                f"this server is full: {self.prompt_tokens} prompt tokens are in flight, the limit is {limit}"
            )

    def refuse_logprobs(self, num_bytes: int) -> None:
        """Raise ApiError(503) if so many more bytes of log-probabilities might be too many."""
        limit = self._config.max_inflight_logprobs_mib << 20
        if self.logprob_bytes and self.logprob_bytes + num_bytes > limit:
            self._metrics.rejected("max_inflight_logprobs")
            raise overloaded(
                f"this server is full: log-probabilities of answers in flight may take {_mib(self.logprob_bytes)} MiB, this "
                f"request's {_mib(num_bytes)} (by its max_tokens), the limit is {self._config.max_inflight_logprobs_mib}"
            )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.4g}"


class Reservation:
    """One request's share of the totals."""

    def __init__(self, admission: Admission, num_sequences: int, token_limit: int) -> None:
        self._admission = admission
        self._num_sequences = num_sequences
        self._token_limit = token_limit
        self._num_tokens = 0
        self._logprob_bytes = 0

    def __enter__(self) -> "Reservation":
        self._admission.sequences += self._num_sequences
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._admission.sequences -= self._num_sequences
        self._admission.prompt_tokens -= self._num_tokens
        self._admission.logprob_bytes -= self._logprob_bytes

    def reserve_tokens(self, num_tokens: int) -> None:
        """Called with a lower bound before tokenising, then with the true number. Raises ApiError(503)."""
        added = num_tokens - self._num_tokens
        if added > 0:
            self._admission.refuse_tokens(added, self._token_limit)
        self._admission.prompt_tokens += added
        self._num_tokens = num_tokens

    def reserve_logprobs(self, num_bytes: int) -> None:
        """What the request's log-probabilities can take at most. Raises ApiError(503)."""
        if num_bytes:
            self._admission.refuse_logprobs(num_bytes)
            self._admission.logprob_bytes += num_bytes
            self._logprob_bytes += num_bytes
