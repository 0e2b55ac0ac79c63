"""Pictures of predictions for many positions: a segmented picture with its doubt, a sentence with coloured words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from errbar.errors import ArgumentError
from errbar.plots.curves import GREY, INK, SMALL, TEXT, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from errbar._distributions.prediction import Prediction

# Colours of classes, one after the other: Okabe and Ito's, and then lighter ones of the same.
# The first, which is often the background, is pale.
_CLASS_COLOURS: tuple[str, ...] = (
    "#E4ECF1",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#56B4E9",
)
_CLASS_COLOURS += ("#A6DAF4", "#F3CF80", "#80CFB9", "#E5BCD3", "#F7F1A1", "#80B8D8", "#EAAF80", "#CCCCCC")


def segmentation(
    picture: Tensor, prediction: Prediction, number: int = 0, *, classes: Sequence[str] | None = None
) -> Figure:
    """A picture beside its most probable classes and its doubt.

    The doubt is the standard deviation of the probability of the most probable class: large where the parameters do not
    determine it, which is at borders, and wherever the picture shows what the training data did not.
    """
    if prediction.pmf.ndim != 4:
        raise ArgumentError(
            f"The prediction is of shape {tuple(prediction.pmf.shape)}; expected (inputs, height, width, classes), as "
            "predict gives it for a posterior of outputs='positions' and pictures."
        )
    image = picture.detach().cpu().float()
    image = image.movedim(0, -1) if image.ndim == 3 else image
    image = image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image
    label = prediction.label[number].cpu()
    doubt = prediction.std[number].gather(-1, prediction.label[number][..., None])[..., 0].cpu()
    figure = new_figure((7.6, 3.1))
    left, middle, right = figure.subplots(1, 3)
    left.imshow(image.clamp(0, 1).numpy(), cmap="gray", interpolation="nearest")
    middle.imshow(_coloured(label), interpolation="nearest")
    shown = right.imshow(
        doubt.float().numpy(), cmap="magma", vmin=0, vmax=max(0.1, float(doubt.max())), interpolation="nearest"
    )
    for ax, title in ((left, "picture"), (middle, "most probable class"), (right, "doubt: its std")):
        ax.set_title(title, fontsize=TEXT, color=INK)
        ax.set_xticks([])
        ax.set_yticks([])
        for side in ax.spines.values():
            side.set_color(GREY)
    bar = figure.colorbar(shown, ax=right, fraction=0.046, pad=0.04)
    bar.ax.tick_params(labelsize=SMALL)
    present = [int(number) for number in label.unique()]
    names = [str(c) for c in range(prediction.pmf.shape[-1])] if classes is None else list(classes)
    _key(middle, [(names[c], _CLASS_COLOURS[c % len(_CLASS_COLOURS)]) for c in present])
    return figure


def tokens(
    words: Sequence[str],
    prediction: Prediction,
    number: int = 0,
    *,
    classes: Sequence[str] | None = None,
    width: float = 7.2,
) -> Figure:
    """A sentence whose words have the colour of their most probable class, stronger the surer it is.

    Below each word is the class with its probability and standard deviation.
    """
    if prediction.pmf.ndim != 3 or len(words) > prediction.pmf.shape[1]:
        raise ArgumentError(
            f"There are {len(words)} words for a prediction of shape {tuple(prediction.pmf.shape)}; expected (inputs, "
            "positions, classes), as predict gives it for a posterior of outputs='positions', with a position for each."
        )
    pmf, std = prediction.pmf[number].cpu(), prediction.std[number].cpu()
    names = [str(c) for c in range(pmf.shape[-1])] if classes is None else list(classes)
    label = pmf.argmax(-1).tolist()
    notes = [f"{names[c]} {pmf[t, c]:.2f} ± {std[t, c]:.2f}" for t, c in enumerate(label[: len(words)])]
    # Rows of words, by a guess of their widths: a figure has no text layout of its own.
    rows: list[list[int]] = [[]]
    used, room = 0.0, width / 0.092
    sizes = [max(1.35 * len(word), len(note)) + 2.5 for word, note in zip(words, notes, strict=True)]
    for t, size in enumerate(sizes):
        if used + size > room and rows[-1]:
            rows.append([])
            used = 0.0
        rows[-1].append(t)
        used += size
    figure = new_figure((width, 0.62 * len(rows) + 0.15))
    ax = figure.subplots()
    ax.set_axis_off()
    ax.set_xlim(0, room)
    ax.set_ylim(len(rows), 0)
    for line, row in enumerate(rows):
        x = 0.0
        for t in row:
            middle = x + sizes[t] / 2
            colour = _CLASS_COLOURS[label[t] % len(_CLASS_COLOURS)]
            strength = float(pmf[t, label[t]].clamp(0.15, 1)) ** 2
            box = {"boxstyle": "round,pad=0.25", "facecolor": _mixed(colour, strength), "edgecolor": "none"}
            ax.text(middle, line + 0.33, words[t], ha="center", va="center", fontsize=10, color=INK, bbox=box)
            ax.text(middle, line + 0.78, notes[t], ha="center", va="center", fontsize=SMALL, color=INK)
            x += sizes[t]
    return figure


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def _mixed(colour: str, strength: float) -> tuple[float, ...]:
    """A colour thinned with white."""
    return tuple(1 - strength * (1 - part) for part in _rgb(colour))


def _coloured(label: Tensor) -> Any:
    table = torch.tensor([_rgb(colour) for colour in _CLASS_COLOURS])
    return table[label % len(_CLASS_COLOURS)].numpy()


def _key(ax: Axes, entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, label=name) for name, colour in entries[:12]]
    ax.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.02),
        ncol=min(6, len(handles)),
        fontsize=SMALL,
        frameon=False,
        handlelength=0.9,
        columnspacing=0.8,
    )
