"""The waterfall: one request's spans as bars over time, nested as they are.

Owns its layout and colours: a line per stage, a lane for all drafts and one for all verifies of a sequence. Never reads
files and never computes what deploy.report_numbers computes. Imports matplotlib only when it draws. Used by deploy.report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deploy.report_canvas import DPI, FONT_SIZE, GRID_COLOUR, PLAIN_COLOUR, WIDTH_IN, new_figure
from deploy.report_numbers import Round, acceptance_of, milliseconds, rounds_of, rounds_under
from deploy.report_spans import Request, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import BoundaryNorm, Colormap
    from matplotlib.figure import Figure

LANES = ("chunked_prefill", "decode_loop", "spec_draft", "spec_verify")  # hundreds of spans each: one line together
MAX_ALIKE = 6  # spans of one name and parent (with n > 1, or several prompts) that get lines of their own
ZOOM_ROUNDS = 24  # rounds in the enlarged part; without more than twice as many there is none
Colour = str | tuple[float, ...]
_LINE_IN = 0.36
_LABEL_WIDTH_PX = 15.0  # a bar narrower than this cannot hold a number
_WHITE_EDGE_PX = 4.0
_AXES_SHARE = 0.74  # of the figure's width, for estimates of bar widths
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
_ALTERNATES = {"chunked_prefill": "#f0bca8", "decode_loop": "#c9d8ea"}
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
            return PLAIN_COLOUR
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
    figure = new_figure(WIDTH_IN, sum(parts) + 1.5 + (0.75 if window else 0.0))
    grid = figure.add_gridspec(len(parts), 1, height_ratios=parts)
    scale = _scale(rounds)
    first = figure.add_subplot(grid[0])
    # A frontend and an engine on two machines have two clocks: a stage may seem to begin before its request.
    extent = (min(span.start_ns for span in request.spans), max(span.end_ns for span in request.spans))
    _draw_lines(first, lines, request.root.start_ns, extent, scale)
    _mark_events(first, lines, request.root.start_ns)
    axes = [first]
    if window is not None:
        first.axvspan(*(_ms(edge, request.root.start_ns) for edge in window), color="#f2e9c9", zorder=0, linewidth=0)
        second = figure.add_subplot(grid[1])
        _draw_lines(second, lanes, request.root.start_ns, window, scale)
        second.set_title("around the slowest round (shaded above)", fontsize=FONT_SIZE, loc="left")
        axes.append(second)
    axes[-1].set_xlabel("milliseconds since the request began", fontsize=FONT_SIZE)
    if rounds:
        _add_colour_scale(figure, axes, scale)
    figure.suptitle(_title(request), fontsize=FONT_SIZE + 1, x=0.01, ha="left", parse_math=False)
    return figure


# ---- lines ----


def _lines(request: Request) -> list[_Line]:
    """Depth first, by start; lanes below their parent; of many alike the first few, and the rest together."""
    lines: list[_Line] = []

    def add(span: Span, depth: int) -> None:
        indent = "   " * (depth + 1)
        lines.append(_Line("   " * depth + _label(span), (span,), is_lane=False))
        alike: dict[str, list[Span]] = {}
        for child in request.children(span):
            alike.setdefault(child.name, []).append(child)
        lines.extend(_Line(indent + name, tuple(alike.pop(name)), is_lane=True) for name in LANES if name in alike)
        shown = {child.span_id for spans in alike.values() for child in spans[:MAX_ALIKE]}
        for child in request.children(span):
            if child.span_id in shown:
                add(child, depth + 1)
        for name, spans in alike.items():
            if len(spans) > MAX_ALIKE:
                rest = tuple(spans[MAX_ALIKE:])
                lines.append(_Line(f"{indent}{_short(name)}, {len(rest)} more", rest, is_lane=True))

    add(request.root, 0)
    return lines


def _label(span: Span) -> str:
    """The name, and which of the n children it is about where there are several."""
    index = span.number("index")
    return _short(span.name) + (f" {index}" if index else "")


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
    px_per_ms = WIDTH_IN * DPI * _AXES_SHARE / length_ms
    for row, line in enumerate(lines):
        spans = [span for span in line.spans if span.end_ns >= extent[0] and span.start_ns <= extent[1]]
        _draw_bars(axes, row, spans, zero_ns, px_per_ms, scale)
        if line.is_lane:
            readable = [span for span in spans if span.duration_ns / 1e6 * px_per_ms >= _LABEL_WIDTH_PX]
            _number_bars(axes, row, readable, zero_ns, scale)
        else:
            _write_duration(axes, row, line.spans[0], zero_ns, (start_ms, length_ms))
    axes.set_yticks(range(len(lines)), [line.label for line in lines], fontsize=FONT_SIZE)
    for label in axes.get_yticklabels():
        label.set_horizontalalignment("left")
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0, pad=150)
    axes.tick_params(axis="x", labelsize=FONT_SIZE)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlim(start_ms - 0.005 * length_ms, end_ms + 0.005 * length_ms)
    axes.grid(axis="x", color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_bars(axes: Axes, row: int, spans: Sequence[Span], zero_ns: int, px_per_ms: float, scale: _Scale) -> None:
    """A wide bar of a lane has a white edge, for rounds follow each other without a gap. A narrow one has an edge of its own
    colour, which keeps a span of a microsecond visible; a failed one has a red one."""
    if not spans:
        return
    faces = [_face(span, number, scale) for number, span in enumerate(spans)]
    edges = [
        _ERROR_COLOUR
        if span.error is not None
        else "white"
        if len(spans) > 1 and span.duration_ns / 1e6 * px_per_ms >= _WHITE_EDGE_PX
        else face
        for span, face in zip(spans, faces, strict=True)
    ]
    axes.broken_barh(
        [(_ms(span.start_ns, zero_ns), span.duration_ns / 1e6) for span in spans],
        (row - 0.36, 0.72),
        facecolors=faces,
        edgecolors=edges,
        linewidths=[1.6 if span.error is not None else 0.5 for span in spans],
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
            fontsize=FONT_SIZE - 1, color=ink, clip_on=True, fontweight="bold",
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
    axes.text(at, row, text, ha=side, va="center", fontsize=FONT_SIZE - 1, color=ink, parse_math=False)


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
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=FONT_SIZE - 1, frameon=False)


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
    bar.set_label(f"draft tokens accepted{grey}", fontsize=FONT_SIZE - 1)
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=FONT_SIZE - 1, length=0)


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


def _ms(at_ns: int, zero_ns: int) -> float:
    return (at_ns - zero_ns) / 1e6


def _short(text: str, limit: int = 40) -> str:
    """One line of at most `limit` characters; names and errors come from elsewhere."""
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
