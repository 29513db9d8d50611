"""What a step costs: a table measured at start-up, and what the steps that ran say about it.

Owns tables, their interpolation and the fit; whoever measures decides what is worth measuring. Called by
engine.speculation.length_choice; the tables are filled by engine.start_up_profile. Times in ns. Without torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

GUESSED_FIXED_TOKENS = (
    16.0  # tokens that cost as much as a step's fixed part: between a CPU (a few) and a GPU (hundreds)
)
GUESSED_TOKEN_NS = 1e6
GUESSED_DRAFT_NS = 2e4  # for a row of a drafter that looks up: what a hash and a copy take in Python
DECAY = 0.995  # a step loses half its weight in 140 steps
PRIOR_SPREAD = 64.0  # squared tokens: until sizes have varied this much, the shape of the belief moves little
CLIP = 3.0  # a step that took longer than this times what was expected was held up by something else
PERIOD = 64  # steps between two fits; at least the longest draft (see `StepCost`)
MOST_VALUES = 4096  # of a table that are kept at hand

Points = tuple[tuple[float, float], ...]  # (slots, ns), slots rising


@dataclass(frozen=True)
class CostTable:
    """Time by rows and slots (tokens of the step, or of its drafts): one line of points for some numbers of rows."""

    rows: tuple[int, ...]  # rising
    lines: tuple[Points, ...]  # at least one, each of at least one point

    def at(self, num_rows: int, slots: float) -> float:
        """Time of `num_rows` rows that share `slots`: interpolated between lines at the same slots per row, linear beyond.

        With one line only, slots are slots, whoever's they are.
        """
        if len(self.rows) == 1:
            return _on_line(self.lines[0], slots)
        upper = next((index for index, rows in enumerate(self.rows) if rows >= num_rows), len(self.rows) - 1)
        upper = max(upper, 1)
        few, many = self.rows[upper - 1], self.rows[upper]
        each = slots / num_rows
        low, high = _on_line(self.lines[upper - 1], each * few), _on_line(self.lines[upper], each * many)
        return max(low + (high - low) * (num_rows - few) / (many - few), 0.0)

    @property
    def slot_ns(self) -> float:
        """What one more slot costs a single row, on average over its line; at least 1."""
        (first, cheap), (last, dear) = self.lines[0][0], self.lines[0][-1]
        return max((dear - cheap) / (last - first), 1.0) if last > first else max(cheap / first, 1.0)


@dataclass(frozen=True)
class StartUpCosts:
    """What is believed of a step before one ran."""

    verify: CostTable  # by rows and tokens of the step: all of the step but its drafting
    draft: CostTable  # by rows that draft and their slots together

    @property
    def num_points(self) -> int:
        return sum(len(line) for table in (self.verify, self.draft) for line in table.lines)


def straight(fixed_ns: float, each_ns: float) -> CostTable:
    """A table that costs `fixed_ns`, and `each_ns` for every slot."""
    return CostTable((1,), (((1.0, fixed_ns + each_ns), (2.0, fixed_ns + 2 * each_ns)),))


def measured_table(measured_ns: Mapping[tuple[int, int], float]) -> CostTable:
    """From times by (rows, slots per row), made monotone: more rows or more slots never cost less.

    A timing that says otherwise was disturbed, or is of a shape that the kernels like better, which the next size undoes.
    Raises ValueError without a single measurement.
    """
    if not measured_ns:
        raise ValueError("a cost table needs at least one measurement")
    lines: dict[int, Points] = {}
    floor: Points = ()
    for rows in sorted({rows for rows, _ in measured_ns}):
        points: list[tuple[float, float]] = []
        for each in sorted(each for count, each in measured_ns if count == rows):
            least = max(points[-1][1] if points else 0.0, dict(floor).get(each, 0.0))
            points.append((rows * each, max(measured_ns[rows, each], least)))
        lines[rows] = tuple(points)
        floor = tuple((slots / rows, took) for slots, took in points)
    return CostTable(tuple(lines), tuple(lines.values()))


GUESSED_COSTS = StartUpCosts(
    straight(GUESSED_FIXED_TOKENS * GUESSED_TOKEN_NS, GUESSED_TOKEN_NS),
    CostTable((1, 2), (((1.0, GUESSED_DRAFT_NS),), ((2.0, 2 * GUESSED_DRAFT_NS),))),
)


class StepCost:
    """Costs as they are believed now: duration = shift + scale * table, fitted by least squares over the newest steps.

    Steps correct how dear the fixed part is against a token and how fast the machine is at the moment; the shape between
    stays the table's. What is believed is always one whole period old: how many tokens a drafter drew in the last rounds,
    which the clock also feels, must not decide how many are put to the target in the next ones, and whatever was drawn
    more than `PERIOD` rounds ago is committed or can never come again.
    """

    def __init__(self, start_up: StartUpCosts | None) -> None:
        tables = start_up or GUESSED_COSTS
        self._verify = _Cached(tables.verify)
        self._draft = _Cached(tables.draft)
        self._fit = _Fit(tables.verify.slot_ns, is_measured=start_up is not None)
        self._draft_scale = _Scale()
        self._since_fit = 0

    def verify_ns(self, num_rows: int, num_tokens: int) -> float:
        """A step of `num_rows` rows and `num_tokens` tokens, drafting left out; more tokens never cost less."""
        shift, scale = self._fit.now
        return max(shift + scale * self._verify.at(num_rows, num_tokens), 1.0)

    def draft_ns(self, num_rows: int, depth: int) -> float:
        """Drafting for `num_rows` rows, `depth` slots for the one that gets most."""
        return self._draft_scale.now * self._draft.at(num_rows, num_rows * depth) if num_rows else 0.0

    def observe(self, num_rows: int, num_tokens: int, verify_ns: float) -> None:
        """A step that decoded and did nothing else."""
        self._fit.observe(self._verify.at(num_rows, num_tokens), verify_ns)
        self._since_fit += 1
        if self._since_fit == PERIOD:
            self._since_fit = 0
            self._fit.renew()
            self._draft_scale.renew()

    def observe_draft(self, num_rows: int, depth: int, draft_ns: float) -> None:
        """The drafting of such a step, where `num_rows` (at least one) were asked for."""
        self._draft_scale.observe(self._draft.at(num_rows, num_rows * depth), draft_ns)


class _Fit:
    """`now` is (shift, scale)."""

    def __init__(self, slot_ns: float, *, is_measured: bool) -> None:
        self.now = self._next = (0.0, 1.0)
        self._prior = PRIOR_SPREAD * slot_ns * slot_ns
        self._expects: tuple[float, float] | None = self.now if is_measured else None  # for the clip
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # weight, x, t, x x, x t

    def observe(self, table_ns: float, took_ns: float) -> None:
        if self._expects is not None:
            shift, scale = self._expects
            took_ns = min(took_ns, CLIP * max(shift + scale * table_ns, 1.0))
        terms = (1.0, table_ns, took_ns, table_ns * table_ns, table_ns * took_ns)
        self._sums = tuple([total * DECAY + term for total, term in zip(self._sums, terms, strict=True)])  # type: ignore[assignment]

    def renew(self) -> None:
        self.now, self._next = self._next, self._fitted()

    def _fitted(self) -> tuple[float, float]:
        """By least squares; the slope is drawn towards the last fit's share of a step as far as sizes have not varied."""
        weight, sum_x, sum_t, sum_xx, sum_xt = self._sums
        mean_x, mean_t = sum_x / weight, sum_t / weight
        shift, scale = self._next
        believed = shift + scale * mean_x
        if mean_t <= 0.0 or believed <= 0.0:
            return self._next  # a clock that stands still says nothing
        spread, joint = max(sum_xx - sum_x * mean_x, 0.0), sum_xt - sum_x * mean_t
        slope = max((joint + self._prior * scale * mean_t / believed) / (spread + self._prior), 0.0)
        self._expects = (mean_t - slope * mean_x, slope)
        return self._expects


class _Scale:
    """How much dearer than the table, from decayed sums; `now` is a period old."""

    def __init__(self) -> None:
        self.now = self._next = 1.0
        self._table_ns = self._took_ns = 0.0

    def observe(self, table_ns: float, took_ns: float) -> None:
        self._table_ns = self._table_ns * DECAY + table_ns
        self._took_ns = self._took_ns * DECAY + took_ns

    def renew(self) -> None:
        self.now = self._next
        if self._table_ns > 0.0 and self._took_ns > 0.0:
            self._next = self._took_ns / self._table_ns


class _Cached:
    """A table's values, kept while they are asked for again and again: a step asks for hundreds."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._values: dict[tuple[int, int], float] = {}

    def at(self, num_rows: int, slots: int) -> float:
        key = (num_rows, slots)
        found = self._values.get(key)
        if found is None:
            if len(self._values) >= MOST_VALUES:
                self._values.clear()
            found = self._values[key] = self._table.at(num_rows, slots)
        return found


def _on_line(points: Points, slots: float) -> float:
    """Between two points the straight line; before the first its value, behind the last as steep as the last two."""
    if slots <= points[0][0] or len(points) == 1:
        return points[0][1]
    index = next((index for index, point in enumerate(points) if point[0] >= slots), len(points) - 1)
    (first, cheap), (last, dear) = points[index - 1], points[index]
    return cheap + (dear - cheap) * (slots - first) / (last - first)
