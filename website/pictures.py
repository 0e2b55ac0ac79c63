"""The pictures of the documentation, drawn with the library alone.

    python website/pictures.py               writes docs/pictures/*.png

All come from one small network for points of three classes, except the two digits, which are those of the tutorial: its
own code is run for them, and the cost against the number of classes, which needs bench/results/classes.json.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

import errbar
import pages
from errbar import plots
from errbar.experiments.evaluation import paired

PICTURES = pages.DOCS / "pictures"
RESULTS = pages.DOCS / "results"
CLASSES = pages.DOCS.parent / "bench" / "results" / "classes.json"
_CENTRES = torch.tensor([[-2.2, -1.0], [2.2, -1.0], [0.0, 2.4]], dtype=torch.float64)
_COLOURS = (plots.BLUE, plots.ORANGE, plots.VERMILION)
_EXTENT = 9.0
_COUNT = 150
_NEAR = [0.15, -0.55]


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three round classes that overlap a little."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    return _CENTRES[y] + 1.1 * torch.randn(count, 2, generator=generator, dtype=torch.float64), y


def classifier() -> errbar.Posterior:
    """A network trained on 150 points until it is over-confident, with its posterior."""
    x, y = points(_COUNT, seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(600):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    information = errbar.collect(model, [(x, y)], last_layers=2)
    return errbar.condition(information, errbar.choose_prior(information))


def plane(posterior: errbar.Posterior) -> Figure:
    """The predictions of the network over the plane, and how far off they may be."""
    side = torch.linspace(-_EXTENT, _EXTENT, 161, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    prediction = posterior.predict(grid)
    shape = (len(side), len(side))
    says = posterior.model(grid).softmax(1).detach()
    colours = torch.tensor([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in _COLOURS], dtype=torch.float64)
    mixed = (says @ colours).reshape(*shape, 3).permute(1, 0, 2)
    spread = prediction.std.amax(1).reshape(shape).T

    figure = Figure(figsize=(7.6, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    box = (-_EXTENT, _EXTENT, -_EXTENT, _EXTENT)
    left.imshow(mixed.numpy(), origin="lower", extent=box, interpolation="bilinear")
    left.set_title("probabilities of the network", fontsize=10)
    white_to_dark = LinearSegmentedColormap.from_list("spread", ["white", plots.SKY, plots.BLUE, plots.INK])
    drawn = right.imshow(
        spread.numpy(), origin="lower", extent=box, cmap=white_to_dark, vmin=0, interpolation="bilinear"
    )
    right.set_title("largest standard deviation of them", fontsize=10)
    figure.colorbar(drawn, ax=right, shrink=0.85)
    x, y = points(_COUNT, seed=0)
    for ax in (left, right):
        for number in range(3):
            own = x[y == number]
            ax.scatter(own[:, 0], own[:, 1], s=12, c=_COLOURS[number], edgecolors="white", linewidths=0.5)
        ax.set(xticks=[], yticks=[])
    return figure


def far_point(posterior: errbar.Posterior) -> Tensor:
    """The point far from all data about which the network knows least."""
    side = torch.linspace(-_EXTENT, _EXTENT, 41, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    grid = grid[(grid.norm(dim=1) > 7) & (grid.norm(dim=1) < 8)]
    return grid[posterior.predict(grid).mutual_information.argmax()]


def logits(posterior: errbar.Posterior) -> Figure:
    """P^g of a point among the data and of one far away, and the resulting PMFs."""
    x = torch.stack([torch.tensor(_NEAR, dtype=torch.float64), far_point(posterior)])
    gaussian, prediction = posterior.logits(x), posterior.predict(x)
    reach = float((gaussian.centered().mean.abs() + 2.5 * gaussian.centered().variance.sqrt()).max())
    figure = Figure(figsize=(7.6, 4.6), layout="constrained")
    axes = figure.subplots(2, 2, height_ratios=(1.5, 1))
    for column, title in enumerate(("among the data", "far from the data")):
        first, second = sorted(prediction.pmf[column].topk(2).indices.tolist())
        pair = (first, second)
        plots.logit_ellipse(gaussian, column, classes=pair, limits=(-reach, reach), ax=axes[0][column])
        axes[0][column].set_title(title, fontsize=10)
        plots.pmf(prediction, column, highlight=pair, ax=axes[1][column])
    return figure


def samples(posterior: errbar.Posterior) -> Figure:
    """The samples of one probability, and the numbers read off them."""
    x = torch.tensor([_NEAR], dtype=torch.float64)
    prediction = posterior.predict(x, samples=4000)
    number = int(prediction.label[0])
    values = prediction.samples()[0, :, number]
    mean, std = float(prediction.pmf[0, number]), float(prediction.std[0, number])
    lower, upper = (float(bound[0, number]) for bound in prediction.interval(0.95))
    figure = Figure(figsize=(7.0, 2.6), layout="constrained")
    ax = figure.subplots()
    ax.hist(values.numpy(), bins=60, range=(0, 1), color=plots.SKY, edgecolor="white", linewidth=0.4)
    top = ax.get_ylim()[1]
    ax.vlines(mean, 0, 1.02 * top, color=plots.BLUE, linewidth=1.6)
    ax.text(mean, 1.04 * top, f"mean {mean:.2f} ± {std:.2f}", ha="center", fontsize=9, color=plots.BLUE)
    ax.annotate("", (lower, 1.2 * top), (upper, 1.2 * top), arrowprops={"arrowstyle": "<->", "color": plots.INK})
    ax.text((lower + upper) / 2, 1.23 * top, f"95 %: {lower:.2f} to {upper:.2f}", fontsize=9, ha="center")
    threshold = 0.5
    ax.vlines(threshold, 0, top, color=plots.VERMILION, linewidth=1.4, linestyle=(0, (4, 3)))
    share = float(prediction.risk(threshold)[0, number])
    risk = f"risk: Pr{{f > {threshold}}} = {share:.2f}"
    ax.text(threshold - 0.01, 0.85 * top, risk, ha="right", fontsize=9, color=plots.VERMILION)
    ax.set_ylim(0, 1.35 * top)
    ax.set(xlim=(0, 1), yticks=[])
    ax.set_xlabel(f"probability of class {number}", fontsize=9)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    return figure


def reliability(posterior: errbar.Posterior) -> Figure:
    """The network as it is, and after calibration."""
    x, y = points(3000, seed=2)
    says = posterior.model(x).softmax(1).detach()
    return plots.reliability_grid({"the network": says, "calibrated": posterior.predict(x).pmf}, y, columns=2)


def aim() -> Figure:
    """The NLL of errbar minus that of temperature scaling on real data, with 95 % intervals over the runs."""
    sources = (
        ("MNIST", "mnist", "both"),
        ("CIFAR-10", "cifar10", "both"),
        ("ResNet-20, last layer", "resnet20", "both"),
        ("ResNet-20, last layer and norms", "resnet20", "norms_ggn_both"),
        ("ResNet-32, last layer", "resnet32", "both"),
        ("ResNet-32, last layer and norms", "resnet32", "norms_ggn_both"),
        ("GTSRB", "gtsrb", "both"),
    )
    figure = Figure(figsize=(7.0, 2.4), layout="constrained")
    ax = figure.subplots()
    ax.axvline(0, color=plots.INK, linewidth=0.8, linestyle=(0, (4, 3)))
    for place, (_, stem, method) in enumerate(sources):
        runs = json.loads((RESULTS / f"{stem}.json").read_text())["runs"]
        ours, theirs = ([run["scores"][key]["nll"] for run in runs] for key in (method, "temperature_nll"))
        difference = paired(ours, theirs)
        low, high = difference["interval"]
        colour = plots.BLUE if high < 0 else plots.VERMILION if low > 0 else plots.INK
        ax.plot([low, high], [place, place], color=colour, linewidth=1.6)
        ax.plot([difference["mean"]], [place], "o", color=colour, markersize=5)
    ax.set_yticks(range(len(sources)), [name for name, _, _ in sources], fontsize=8)
    ax.invert_yaxis()
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("NLL minus that of temperature scaling; left is better", fontsize=9)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return figure


def two_digits(folder: Path) -> bytes:
    """The picture drawn by the tutorial on digits."""
    for _ in pages.run_page("tutorials/digits.md", folder):
        pass
    return (folder / "two-digits.png").read_bytes()


def classes() -> Figure:
    """The cost of a fit and of a prediction in forward passes, and the factorisation, against the number of classes."""
    rows = json.loads(CLASSES.read_text())["rows"]
    figure = Figure(figsize=(7.6, 2.7), layout="constrained")
    axes = figure.subplots(1, 3)
    keys = ("fit, passes per sample", "predict, passes per input", "factorise, s")
    titles = ("fit, forward passes\nper sample", "100 draws, forward passes\nper input", "factorisation, seconds\nonce")
    for ax, key, title in zip(axes, keys, titles, strict=True):
        for head, colour, marker in (("kron", plots.BLUE, "o"), ("diag", plots.ORANGE, "s")):
            own = [row for row in rows if row["head"] == head and key in row]
            line = {"color": colour, "marker": marker, "linewidth": 1.2, "markersize": 4.5, "label": f"head: {head}"}
            ax.plot([row["classes"] for row in own], [max(row[key], 1e-3) for row in own], **line)
            if key == "factorise, s" and head == "kron":
                last = own[-1]
                cubic = [last[key] * (row["classes"] / last["classes"]) ** 3 for row in own]
                ax.plot([row["classes"] for row in own], cubic, color=plots.INK, linewidth=0.8, linestyle=(0, (4, 3)))
                ax.annotate("M³", (last["classes"], cubic[-1]), xytext=(4, -10), textcoords="offset points", fontsize=8)
        ax.set_xscale("log")
        if key == "factorise, s":
            ax.set_ylim(bottom=5e-4)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("classes M", fontsize=9)
        ax.tick_params(labelsize=8)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    for ax in axes[:2]:
        ax.set_ylim(bottom=0)
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    if CLASSES.exists():
        classes().savefig(PICTURES / "classes.png", dpi=150, metadata={"Software": None})
    aim().savefig(PICTURES / "aim.png", dpi=150, metadata={"Software": None})
    posterior = errbar.calibrate(classifier(), [points(600, seed=1)])
    for draw in (plane, logits, samples, reliability):
        draw(posterior).savefig(PICTURES / f"{draw.__name__}.png", dpi=150, metadata={"Software": None})
    with tempfile.TemporaryDirectory() as folder:
        (PICTURES / "two-digits.png").write_bytes(two_digits(Path(folder).resolve()))


if __name__ == "__main__":
    main()
