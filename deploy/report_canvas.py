"""What the pictures of a report share: the canvas, sizes, and one colour for rounds without a draft.

Gives matplotlib figures drawn without any window and without global state. Imports matplotlib only when one is made. Used by
deploy.report_waterfall and deploy.report_acceptance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 110
WIDTH_IN = 12.0
FONT_SIZE = 9
PLAIN_COLOUR = "#b9bdc2"
GRID_COLOUR = "#e3e3e3"


def new_figure(width_in: float, height_in: float) -> Figure:
    """A figure with the Agg canvas and no global state behind it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure
