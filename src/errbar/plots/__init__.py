"""Figures: values in, matplotlib axes out.

Nothing here touches pyplot or its settings. Without `ax` a new `Figure` is made; save it with
`ax.figure.savefig(path)`, or draw into a pyplot figure by passing `ax=plt.gca()`.

Colours (Okabe and Ito's, safe for the colour-blind) mean the same everywhere: blue the accuracy or the first
class, orange the second class, vermilion the error, grey the rest. Where several methods share a picture, each has
a `Style`: a colour, a dash and a marker.
"""

from errbar.plots.chosen import choice
from errbar.plots.curves import BLUE, GREY, INK, ORANGE, SKY, VERMILION, Style, risk_coverage, roc, shift, styles
from errbar.plots.positions import segmentation, tokens
from errbar.plots.single import diagram, diagram_grid, figure_one, logit_ellipse, pmf, reliability, reliability_grid

__all__ = [
    "BLUE",
    "GREY",
    "INK",
    "ORANGE",
    "SKY",
    "VERMILION",
    "Style",
    "choice",
    "diagram",
    "diagram_grid",
    "figure_one",
    "logit_ellipse",
    "pmf",
    "reliability",
    "reliability_grid",
    "risk_coverage",
    "roc",
    "segmentation",
    "shift",
    "styles",
    "tokens",
]
