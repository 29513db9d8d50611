"""What a step costs, from steps that ran: a fixed part, and a part for every token.

Owns the fit only; whoever measures decides what is worth measuring. Called by engine.draft_lengths. Without torch.
"""

FIRST_GUESS = 16.0  # tokens that cost as much as the fixed part: between a CPU (a few) and a GPU (hundreds)
MOST = 1024.0  # beyond it drafts are free, and no longer draft could ever be told from a shorter one
DECAY = 0.995  # a step loses half its weight in 140 steps
PRIOR_SPREAD = 64.0  # squared tokens: until sizes have varied this much, the estimate moves little
CLIP = 3.0  # a step that took longer than this times what was expected was held up by something else
PERIOD = 64  # steps between two fits


class StepCost:
    """Fits duration = fixed + each * tokens, by least squares over the newest steps.

    `fixed_tokens` is fixed / each. It is always one whole period old: how many tokens a drafter drew in the last rounds,
    which the clock also feels, must not decide how many are put to the target in the next ones.
    """

    __slots__ = ("_measured", "_next", "_scale", "_since_fit", "_sums", "fixed_tokens")

    def __init__(self) -> None:
        self.fixed_tokens = FIRST_GUESS
        self._next = FIRST_GUESS
        self._scale: tuple[float, float] | None = None  # (fixed, each) in ns, for the clip
        self._since_fit = 0
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # weight, n, t, n n, n t

    def observe(self, num_tokens: int, duration_ns: float) -> None:
        """A step of `num_tokens` that decoded and did nothing else."""
        if self._scale is not None:
            fixed, each = self._scale
            duration_ns = min(duration_ns, CLIP * (fixed + each * num_tokens))
        terms = (1.0, num_tokens, duration_ns, num_tokens * num_tokens, num_tokens * duration_ns)
        self._sums = tuple([total * DECAY + term for total, term in zip(self._sums, terms, strict=True)])  # type: ignore[assignment]
        self._since_fit += 1
        if self._since_fit == PERIOD:
            self._since_fit = 0
            self.fixed_tokens, self._next = self._next, self._fit()

    def _fit(self) -> float:
        """The ratio by least squares, drawn towards the last one as far as sizes have not varied."""
        weight, sum_n, sum_t, sum_nn, sum_nt = self._sums
        mean_n, mean_t = sum_n / weight, sum_t / weight
        if mean_t <= 0.0:
            return self._next  # a clock that stands still says nothing
        spread, joint = sum_nn - sum_n * mean_n, sum_nt - sum_n * mean_t
        each = (joint + PRIOR_SPREAD * mean_t / (self._next + mean_n)) / (spread + PRIOR_SPREAD)
        fixed = mean_t - each * mean_n
        self._scale = (max(fixed, 0.0), max(each, 0.0))
        if each * MOST <= fixed:
            return MOST
        return max(fixed / each, 0.0)
