"""How the course's pages draw."""

from __future__ import annotations

#: For `plt.style.use`: figures that can be read on white and on black. Two greys, since JupyterLab puts a white box
#: behind a transparent figure whose labels are all darker than the middle, or all lighter.
PLOT = {
    "axes.facecolor": "none",
    "axes.edgecolor": "#7f7f7f",
    "axes.labelcolor": "#7f7f7f",
    "figure.facecolor": "none",
    "legend.facecolor": "none",
    "text.color": "#7f7f7f",
    "xtick.color": "#7f7f7f",
    "ytick.color": "#808080",
}
