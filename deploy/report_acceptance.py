"""The picture of acceptance: how far down the drafts the target agreed, and how many tokens the rounds gained.

Owns its layout. Never reads files and never computes what deploy.report_numbers computes. Imports matplotlib only when it
draws. Used by deploy.report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from deploy.report_canvas import FONT_SIZE, GRID_COLOUR, PLAIN_COLOUR, WIDTH_IN, new_figure
from deploy.report_numbers import Acceptance, Round, acceptance_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERVER_COLOUR, _REQUEST_COLOUR = "#3f6fa8", "#d98c3f"


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
    figure = new_figure(WIDTH_IN if has_rounds else WIDTH_IN / 2 + 0.6, 4.4)
    by_position = figure.add_subplot(1, 2 if has_rounds else 1, 1)
    _draw_positions(by_position, groups)
    if has_rounds:
        _draw_histogram(figure.add_subplot(1, 2, 2), rounds)
    return figure


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
            axes.bar_label(bars, [f"{value:.0f}" for value in percent], fontsize=FONT_SIZE - 1, padding=1)
    axes.set_ylim(0, 100 + 9 * (len(groups) + 1))
    axes.set_yticks(range(0, 101, 20))
    axes.set_xticks(range(0, longest, max(1, longest // 16)))
    _finish(axes, "Acceptance by draft position", "position in the draft", "% of drafts accepted there")
    axes.legend(loc="upper right", fontsize=FONT_SIZE - 1, frameon=False)


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
        axes.bar_label(bars, texts, fontsize=FONT_SIZE - 1, padding=1)
    if num_plain:
        axes.bar([-1], [num_plain], 0.8, color=PLAIN_COLOUR, label=f"plain rounds, no draft: {num_plain}")
        axes.legend(loc="upper center", fontsize=FONT_SIZE - 1, frameon=False)
    step = max(1, longest // 16)
    ticks = values[::step]
    axes.set_xticks([-1, *ticks] if num_plain else ticks, [*(["none"] if num_plain else []), *map(str, ticks)])
    axes.set_ylim(0, 1.22 * max([*drafted.values(), num_plain]))
    axes.locator_params(axis="y", integer=True)
    _finish(axes, f"The {len(rounds)} rounds of this request", "draft tokens accepted in a round", "rounds")


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=FONT_SIZE + 1, loc="left")
    axes.set_xlabel(x_label, fontsize=FONT_SIZE)
    axes.set_ylabel(y_label, fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE)
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
