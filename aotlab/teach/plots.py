"""The style of the figures on the course's pages."""

from __future__ import annotations

#: For `plt.style.use`: figures that are readable on a white and on a black background. There are two greys, because
#: JupyterLab puts a white box behind a transparent figure if its labels are all dark or all light.
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
