"""The pictures of a report: one request's spans over time, and what became of the drafts.

Owns layout and colour. Gives matplotlib figures drawn without any window; never reads files and never computes what
deploy.report_numbers computes. Imports matplotlib only when a picture is drawn. Used by deploy.report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.report_numbers import Acceptance, Round, acceptance_of, milliseconds, rounds_of, rounds_under
from deploy.report_spans import Request, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import BoundaryNorm, Colormap
    from matplotlib.figure import Figure

LANES = ("chunked_prefill", "decode_loop", "spec_draft", "spec_verify")  # hundreds of spans each: one line together
MAX_CHILDREN = 6  # decode_forward spans of a request with n > 1 that get lines of their own
ZOOM_ROUNDS = 24  # rounds in the enlarged part; without more than twice as many there is none
Colour = str | tuple[float, ...]
DPI = 110
_WIDTH_IN = 12.0
_LINE_IN = 0.36
_LABEL_WIDTH_PX = 15.0  # a bar narrower than this cannot hold a number
_AXES_SHARE = 0.74  # of the figure's width, for estimates of bar widths
_FONT_SIZE = 9
_COLOURS = {
    "tokenize": "#7a9e3c",
    "api_server_dispatch": "#a3b18a",
    "request_process": "#c9b458",
    "prefill_waiting": "#d9a441",
    "prefill_forward": "#d1603d",
    "chunked_prefill": "#e59b7f",
    "decode_forward": "#3f6fa8",
    "decode_loop": "#a9c0dc",
    "spec_draft": "#8d5fa8",
}
_OTHER_COLOUR = "#5c6670"
_PLAIN_COLOUR = "#b9bdc2"
_ALTERNATES = {"chunked_prefill": "#f0bca8", "decode_loop": "#c9d8ea"}
_SERVER_COLOUR, _REQUEST_COLOUR = "#3f6fa8", "#d98c3f"
_ERROR_COLOUR = "#c0182b"


@dataclass(frozen=True)
class _Line:
    """One line of the waterfall: a span of its own, or a lane of many."""

    label: str
    spans: tuple[Span, ...]
    is_lane: bool


@dataclass(frozen=True)
class _Scale:
    """How spec_verify is coloured: by accepted draft tokens, and grey where the round had no draft."""

    colour_map: Colormap
    norm: BoundaryNorm
    num_steps: int
    plain: frozenset[str]  # span ids

    def of(self, verify: Span) -> Colour:
        if verify.span_id in self.plain:
            return _PLAIN_COLOUR
        return self.colour_map(self.norm(verify.number("num_correct_drafts")))

    def ink(self, verify: Span) -> str:
        """Of a number on the bar: the upper shades are light."""
        is_light = verify.span_id in self.plain or verify.number("num_correct_drafts") >= 0.6 * (self.num_steps - 1) > 0
        return "#222222" if is_light else "white"


def waterfall(request: Request) -> Figure:
    """The spans of one request over time, nested as they are; with many rounds, also the surroundings of the slowest."""
    lines = _lines(request)
    rounds = rounds_of(request)
    window = _slowest_window(request)
    lanes = [line for line in lines if line.is_lane and line.label.strip() != "chunked_prefill"]
    parts = [len(lines) * _LINE_IN] + ([len(lanes) * _LINE_IN + 0.1] if window else [])
    figure = _figure(_WIDTH_IN, sum(parts) + 1.5 + (0.75 if window else 0.0))
    grid = figure.add_gridspec(len(parts), 1, height_ratios=parts)
    scale = _scale(rounds)
    first = figure.add_subplot(grid[0])
    extent = (request.root.start_ns, max(span.end_ns for span in request.spans))
    _draw_lines(first, lines, request.root.start_ns, extent, scale)
    _mark_events(first, lines, request.root.start_ns)
    axes = [first]
    if window is not None:
        first.axvspan(*(_ms(edge, request.root.start_ns) for edge in window), color="#f2e9c9", zorder=0, linewidth=0)
        second = figure.add_subplot(grid[1])
        _draw_lines(second, lanes, request.root.start_ns, window, scale)
        second.set_title("around the slowest round (shaded above)", fontsize=_FONT_SIZE, loc="left")
        axes.append(second)
    axes[-1].set_xlabel("milliseconds since the request began", fontsize=_FONT_SIZE)
    if rounds:
        _add_colour_scale(figure, axes, scale)
    figure.suptitle(_title(request), fontsize=_FONT_SIZE + 1, x=0.01, ha="left", parse_math=False)
    return figure


def acceptance(server: Acceptance | None, rounds: Sequence[Round]) -> Figure | None:
    """Acceptance by position, of the server since its start and of one request, and its rounds by accepted tokens.

    None when neither has a draft: there is nothing to draw.
    """
    own = acceptance_of(rounds)
    groups = [("this server", server, _SERVER_COLOUR)] if server is not None and server.num_drafts else []
    groups += [("this request", own, _REQUEST_COLOUR)] if own.num_drafts else []
    if not groups:
        return None
    has_rounds = own.num_drafts > 0
    figure = _figure(_WIDTH_IN if has_rounds else _WIDTH_IN / 2 + 0.6, 4.4)
    by_position = figure.add_subplot(1, 2 if has_rounds else 1, 1)
    _draw_positions(by_position, groups)
    if has_rounds:
        _draw_histogram(figure.add_subplot(1, 2, 2), rounds)
    return figure


# ---- the waterfall ----


def _lines(request: Request) -> list[_Line]:
    """Depth first, by start; lanes below their parent; of many children of n the first few."""
    lines: list[_Line] = []

    def add(span: Span, depth: int) -> None:
        lines.append(_Line("   " * depth + _short(span.name), (span,), is_lane=False))
        children = request.children(span)
        for name in LANES:
            lane = tuple(child for child in children if child.name == name)
            if lane:
                lines.append(_Line("   " * (depth + 1) + name, lane, is_lane=True))
        others = [child for child in children if child.name not in LANES]
        decodes = [child for child in others if child.name == "decode_forward"]
        left_out = {child.span_id for child in decodes[MAX_CHILDREN:]}
        for child in others:
            if child.span_id not in left_out:
                add(child, depth + 1)
        if left_out:
            rest = tuple(decodes[MAX_CHILDREN:])
            lines.append(_Line("   " * (depth + 1) + f"decode_forward, {len(rest)} more", rest, is_lane=True))

    add(request.root, 0)
    return lines


def _slowest_window(request: Request) -> tuple[int, int] | None:
    """Start and end of the `ZOOM_ROUNDS` rounds of one child around its slowest; None when all are readable anyway."""
    children = [rounds_under(request, decode) for decode in request.named("decode_forward")]
    long_ones = [rounds for rounds in children if len(rounds) > 2 * ZOOM_ROUNDS]
    if not long_ones:
        return None
    rounds, slowest = max(
        ((rounds, index) for rounds in long_ones for index in range(len(rounds))),
        key=lambda place: place[0][place[1]].verify.end_ns - _start(place[0][place[1]]),
    )
    first = min(max(slowest - ZOOM_ROUNDS // 2, 0), len(rounds) - ZOOM_ROUNDS)
    shown = rounds[first : first + ZOOM_ROUNDS]
    return _start(shown[0]), max(one.verify.end_ns for one in shown)


def _start(one: Round) -> int:
    return one.verify.start_ns if one.draft is None else one.draft.start_ns


def _draw_lines(axes: Axes, lines: Sequence[_Line], zero_ns: int, extent: tuple[int, int], scale: _Scale) -> None:
    """Bars in ms since `zero_ns`; `extent` (unix ns) is what the axis shows."""
    start_ms, end_ms = (_ms(edge, zero_ns) for edge in extent)
    length_ms = max(end_ms - start_ms, 1e-6)
    px_per_ms = _WIDTH_IN * DPI * _AXES_SHARE / length_ms
    for row, line in enumerate(lines):
        spans = [span for span in line.spans if span.end_ns >= extent[0] and span.start_ns <= extent[1]]
        _draw_bars(axes, row, spans, zero_ns, scale)
        if line.is_lane:
            readable = [span for span in spans if span.duration_ns / 1e6 * px_per_ms >= _LABEL_WIDTH_PX]
            _number_bars(axes, row, readable, zero_ns, scale)
        else:
            _write_duration(axes, row, line.spans[0], zero_ns, (start_ms, length_ms))
    axes.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=_FONT_SIZE)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0, pad=150)
    axes.tick_params(axis="x", labelsize=_FONT_SIZE)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(start_ms - 0.005 * length_ms, end_ms + 0.005 * length_ms)
    axes.grid(axis="x", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bars(axes: Axes, row: int, spans: Sequence[Span], zero_ns: int, scale: _Scale) -> None:
    if not spans:
        return
    faces = [_face(span, number, scale) for number, span in enumerate(spans)]
    edges = [_ERROR_COLOUR if span.error is not None else face for span, face in zip(spans, faces, strict=True)]
    # The edge, in the bar's own colour, keeps a span of a microsecond visible.
    axes.broken_barh(
        [(_ms(span.start_ns, zero_ns), span.duration_ns / 1e6) for span in spans],
        (row - 0.36, 0.72),
        facecolors=faces,
        edgecolors=edges,
        linewidths=[1.6 if span.error is not None else 0.4 for span in spans],
    )


def _face(span: Span, number: int, scale: _Scale) -> Colour:
    if span.name == "spec_verify":
        return scale.of(span)
    if span.name in _ALTERNATES and number % 2:  # these follow each other without a gap
        return _ALTERNATES[span.name]
    return _COLOURS.get(span.name, _OTHER_COLOUR)


def _number_bars(axes: Axes, row: int, spans: Sequence[Span], zero_ns: int, scale: _Scale) -> None:
    """Draft tokens, and accepted tokens of rounds that had some to accept."""
    for span in spans:
        if span.name == "spec_draft":
            number, ink = span.number("num_draft_tokens"), "white"
        elif span.name == "spec_verify" and span.span_id not in scale.plain:
            number, ink = span.number("num_correct_drafts"), scale.ink(span)
        else:
            continue
        axes.text(
            _ms((span.start_ns + span.end_ns) // 2, zero_ns), row, str(number), ha="center", va="center",
            fontsize=_FONT_SIZE - 1, color=ink, clip_on=True, fontweight="bold",
        )  # fmt: skip


def _write_duration(axes: Axes, row: int, span: Span, zero_ns: int, axis: tuple[float, float]) -> None:
    """Behind the bar; before it when the bar ends near the right edge; inside when it fills the line."""
    start_ms, length_ms = axis
    begin, end = _ms(span.start_ns, zero_ns), _ms(span.end_ns, zero_ns)
    text = milliseconds(span.duration_ns) + ("" if span.error is None else f"  error: {_short(span.error or '-', 60)}")
    room = (len(text) + 2) * 0.0075 * length_ms
    gap = 0.006 * length_ms
    inside = end + room > start_ms + length_ms and end - begin > room
    at, side = (end + gap, "left") if end + room <= start_ms + length_ms else (end - gap, "right")
    if side == "right" and not inside:
        at = begin - gap
    ink = "white" if inside else _ERROR_COLOUR if span.error is not None else "#333333"
    axes.text(at, row, text, ha=side, va="center", fontsize=_FONT_SIZE - 1, color=ink, parse_math=False)


def _mark_events(axes: Axes, lines: Sequence[_Line], zero_ns: int) -> None:
    """Preemptions, where they struck."""
    points = [
        (_ms(at_ns, zero_ns), row)
        for row, line in enumerate(lines)
        for span in line.spans
        for name, at_ns in span.events
        if name == "retract"
    ]
    if points:
        times, rows = zip(*points, strict=True)
        axes.plot(
            times, rows, "v", color=_ERROR_COLOUR, markeredgecolor="white", markersize=8, label="preempted", clip_on=False,
            linestyle="none",
        )  # fmt: skip
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=_FONT_SIZE - 1, frameon=False)


def _scale(rounds: Sequence[Round]) -> _Scale:
    """From dark for nothing accepted to light: one step per token, readable without telling red from green."""
    from matplotlib import colormaps
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap

    num_steps = max((one.drafted for one in rounds), default=0) + 1
    shades = [colormaps["viridis"](0.88 * step / max(num_steps - 1, 1)) for step in range(num_steps)]
    if num_steps == 1:
        shades *= 2  # a map of one colour still wants two ends
    colour_map = LinearSegmentedColormap.from_list("accepted", shades, N=num_steps)
    norm = BoundaryNorm([step - 0.5 for step in range(num_steps + 1)], num_steps)
    plain = frozenset(one.verify.span_id for one in rounds if not one.drafted)
    return _Scale(colour_map, norm, num_steps, plain)


def _add_colour_scale(figure: Figure, axes: list[Axes], scale: _Scale) -> None:
    from matplotlib.cm import ScalarMappable

    bar = figure.colorbar(ScalarMappable(scale.norm, scale.colour_map), ax=axes, fraction=0.02, pad=0.015)
    bar.set_ticks(list(range(0, scale.num_steps, max(1, scale.num_steps // 8))))
    grey = " (grey: no draft)" if scale.plain else ""
    bar.set_label(f"draft tokens accepted{grey}", fontsize=_FONT_SIZE - 1)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=_FONT_SIZE - 1, length=0)


def _title(request: Request) -> str:
    root = request.root
    parts = [f"{root.number('gen_ai.usage.input_tokens')} prompt tokens"]
    parts.append(f"{root.number('gen_ai.usage.output_tokens')} output tokens")
    rounds = rounds_of(request)
    own = acceptance_of(rounds)
    if rounds:
        parts.append(f"{len(rounds)} rounds")
    if own.num_drafts:
        parts.append(f"accept length {own.length:.2f} over {own.num_drafts} drafts")
    clocks = sorted({str(span.attributes["clock"]) for span in request.spans if "clock" in span.attributes})
    if clocks:
        parts.append(f"{' and '.join(clocks)} clock")
    return f"{_short(root.name, 60)}, {milliseconds(root.duration_ns)}, trace {root.trace_id}\n" + ", ".join(parts)


# ---- acceptance ----


def _draw_positions(axes: Axes, groups: Sequence[tuple[str, Acceptance, str]]) -> None:
    width = 0.8 / len(groups)
    longest = max(len(one.per_position) for _, one, _ in groups)
    for number, (name, one, colour) in enumerate(groups):
        shift = (number - (len(groups) - 1) / 2) * width
        percent = [100 * rate for rate in one.rate_per_position]
        label = f"{name}: {one.num_drafts} drafts, accept length {one.length:.2f}"
        bars = axes.bar(
            [position + shift for position in range(len(percent))], percent, width, color=colour, label=label
        )
        if longest * len(groups) <= 16:
            axes.bar_label(bars, [f"{value:.0f}" for value in percent], fontsize=_FONT_SIZE - 1, padding=1)
    axes.set_ylim(0, 100 + 9 * (len(groups) + 1))
    axes.set_yticks(range(0, 101, 20))
    axes.set_xticks(range(0, longest, max(1, longest // 16)))
    _finish(axes, "Acceptance by draft position", "position in the draft", "% of drafts accepted there")
    axes.legend(loc="upper right", fontsize=_FONT_SIZE - 1, frameon=False)


def _draw_histogram(axes: Axes, rounds: Sequence[Round]) -> None:
    drafted = Counter(one.correct for one in rounds if one.drafted)
    num_plain = sum(not one.drafted for one in rounds)
    longest = max(one.drafted for one in rounds)
    values = list(range(longest + 1))
    bars = axes.bar(
        values, [drafted[value] for value in values], 0.8, color=_REQUEST_COLOUR, label="rounds with a draft"
    )
    if longest <= 16:
        texts = [str(drafted[value]) if drafted[value] else "" for value in values]
        axes.bar_label(bars, texts, fontsize=_FONT_SIZE - 1, padding=1)
    if num_plain:
        axes.bar([-1], [num_plain], 0.8, color=_PLAIN_COLOUR, label=f"plain rounds, no draft: {num_plain}")
        axes.legend(loc="upper center", fontsize=_FONT_SIZE - 1, frameon=False)
    step = max(1, longest // 16)
    ticks = values[::step]
    axes.set_xticks([-1, *ticks] if num_plain else ticks, [*(["none"] if num_plain else []), *map(str, ticks)])
    axes.set_ylim(0, 1.22 * max([*drafted.values(), num_plain]))
    axes.locator_params(axis="y", integer=True)
    _finish(axes, f"The {len(rounds)} rounds of this request", "draft tokens accepted in a round", "rounds")


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=_FONT_SIZE + 1, loc="left")
    axes.set_xlabel(x_label, fontsize=_FONT_SIZE)
    axes.set_ylabel(y_label, fontsize=_FONT_SIZE)
    axes.tick_params(labelsize=_FONT_SIZE)
    axes.grid(axis="y", color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


# ---- words and sizes ----


def _figure(width_in: float, height_in: float) -> Figure:
    """A figure with the Agg canvas and no global state behind it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _ms(at_ns: int, zero_ns: int) -> float:
    return (at_ns - zero_ns) / 1e6


def _short(text: str, limit: int = 40) -> str:
    """One line of at most `limit` characters; names and errors come from elsewhere."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
