"""Figures as plain data: what is drawn, apart from how. One style for screen and paper.

Colours are those of Okabe and Ito ("Color Universal Design", 2008), which stay apart for the colour-blind; every role
has a symbol of its own too, so that no figure depends on colour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE, GREY = "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"

Symbol = Literal["circle", "diamond", "star", "x", "square", "triangle"]


@dataclass(frozen=True, slots=True)
class Style:
    """How one role looks: points, line or both."""

    colour: str
    symbol: Symbol | None = None
    size: float = 7.0
    line: Literal["solid", "dash", "dot"] | None = None
    width: float = 1.8
    opacity: float = 1.0
    step: bool = False


STYLES: Mapping[str, Style] = {
    "complete": Style(SKY, "circle", 7.0, opacity=0.85),
    "front": Style(BLUE, "circle", 10.0),
    "front line": Style(BLUE, None, line="solid", width=1.2, step=True),
    "knee": Style(VERMILION, "diamond", 14.0),
    "reference": Style(BLACK, "star", 15.0),
    "infeasible": Style(ORANGE, "x", 8.0),
    "void": Style(GREY, "triangle", 8.0),
    "knee line": Style(VERMILION, None, line="solid", width=2.4),
    "reference line": Style(BLACK, None, line="dash", width=2.0),
    "knee points": Style(VERMILION, "diamond", 9.0, line="solid"),
    "reference points": Style(BLACK, "square", 8.0, line="dash"),
    "trial line": Style(SKY, None, line="solid", width=0.8, opacity=0.6),
    "front trial line": Style(BLUE, "circle", 5.0, line="solid", width=2.0),
    "volume": Style(BLUE, None, line="solid", width=2.2, step=True),
    "gpu0 line": Style(BLUE, None, line="solid", width=1.4),
    "gpu1 line": Style(VERMILION, None, line="dash", width=1.4),
    "gpu2 line": Style(GREEN, None, line="dot", width=1.4),
    "gpu3 line": Style(PURPLE, None, line="solid", width=1.4),
    "host line": Style(GREY, None, line="dash", width=1.4),
    "speed": Style(GREEN, "circle", 4.0, line="solid", width=1.0),
    "bar": Style(BLUE),
}
"""Every role that a series may have."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`title` names what is drawn and its unit. `ticks` maps positions to texts for an axis of categories."""

    title: str
    log: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Series:
    """Points that share a role.

    Parameters
    ----------
    x_interval, y_interval:
        `(low, high)` a point, drawn as error bars; empty for none.
    hover:
        What the pointer shows at each point, lines apart by `<br>`; empty for the figures.
    trials:
        Number of the trial behind each point, for links; empty where a point is no trial.
    """

    name: str
    role: str
    x: tuple[float | None, ...]
    y: tuple[float | None, ...]
    x_interval: tuple[tuple[float, float], ...] = ()
    y_interval: tuple[tuple[float, float], ...] = ()
    hover: tuple[str, ...] = ()
    trials: tuple[int, ...] = ()
    bars: bool = False
    in_legend: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    title: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure: panels side by side or one above the other, and a sentence that says how to read it.

    `name` is the file's name without its ending.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    stacked: bool = False
    panel_height: int = 420
