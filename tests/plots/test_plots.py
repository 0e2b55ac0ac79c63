"""Figures show the numbers they are given."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import same_color
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, Rectangle
from torch import Tensor

from errbar import LogitGaussian, metrics, plots
from errbar._choosing.choice import Choice, Row
from errbar.errors import ArgumentError, MissingExtraError


@pytest.fixture
def gaussian() -> LogitGaussian:
    root = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return LogitGaussian(mean, root @ root.mT)


def _axes() -> Axes:
    return Figure().subplots()


def _pmf_and_labels() -> tuple[Tensor, Tensor]:
    confidence = torch.tensor([0.95, 0.95, 0.95, 0.95, 0.65, 0.65], dtype=torch.float64)
    pmf = torch.stack([confidence, 1 - confidence], dim=1)
    return pmf, torch.tensor([0, 0, 0, 1, 0, 0])


def test_reliability_bars_end_at_the_accuracy_and_the_confidence() -> None:
    pmf, labels = _pmf_and_labels()
    ax = plots.reliability(pmf, labels)
    spans = [
        (bar.get_x(), bar.get_y(), bar.get_y() + bar.get_height()) for bar in ax.patches if isinstance(bar, Rectangle)
    ]
    # Two of two right at confidence 0.65: under-confident. Three of four at 0.95: over-confident.
    expected = [(0.6, 0.0, 0.65), (0.6, 0.65, 1.0), (0.9, 0.0, 0.75), (0.9, 0.75, 0.95)]
    assert len(spans) == len(expected)
    for span, wanted in zip(spans, expected, strict=True):
        assert span == pytest.approx(wanted)
    hatched = [bool(bar.get_hatch()) for bar in ax.patches]
    assert hatched == [False, False, False, True]


def test_reliability_says_its_ece() -> None:
    pmf, labels = _pmf_and_labels()
    texts = [text.get_text() for text in plots.reliability(pmf, labels, bins=5).texts]
    assert texts == [f"ECE {100 * metrics.ece(pmf, labels, bins=5):.1f} %"]


def test_reliability_draws_where_it_is_told_to() -> None:
    pmf, labels = _pmf_and_labels()
    ax = _axes()
    assert plots.reliability(pmf, labels, ax=ax, title="a title") is ax
    titles = [child.get_title() for child in ax.child_axes]
    assert titles == ["a title"]


@pytest.mark.parametrize("methods", [1, 3, 4, 5])
def test_a_grid_holds_every_method_and_one_key(methods: int) -> None:
    pmf, labels = _pmf_and_labels()
    figure = plots.reliability_grid({f"method {number}": pmf for number in range(methods)}, labels, columns=4)
    titles = [child.get_title() for ax in figure.axes for child in ax.child_axes]
    assert titles == [f"method {number}" for number in range(methods)]
    keys = [*figure.legends, *(ax.get_legend() for ax in figure.axes if ax.get_legend() is not None)]
    assert len(keys) == 1
    figure.draw_without_rendering()


def _calibrated(count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    pmf = torch.rand(count, 3, generator=draws, dtype=torch.float64).pow(3)
    return pmf / pmf.sum(1, keepdim=True), torch.arange(count) % 3


_LONG = "(vi) proposed, $T_c$ by NLL, all layers, number"


def _grid(methods: int, columns: int, name: str) -> Figure:
    pmf, labels = _calibrated(200)
    return plots.reliability_grid({f"{name} {n}": pmf for n in range(methods)}, labels, columns=columns)


def _illustrated(names: list[str] | None) -> Figure:
    mean = torch.randn(2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gaussian = LogitGaussian(mean, torch.eye(4, dtype=torch.float64).expand(2, 4, 4))
    titles = ["labelled 3", "labelled as a class of a long name"]
    return plots.figure_one(torch.rand(2, 8, 8), gaussian, gaussian.predict(), titles=titles, names=names)


DRAWINGS: dict[str, Callable[[], Any]] = {
    "one method": lambda: _grid(1, 4, "m"),
    "two methods": lambda: _grid(2, 4, _LONG),
    "a full row": lambda: _grid(4, 4, "m"),
    "an empty place": lambda: _grid(3, 2, _LONG),
    "one diagram": lambda: plots.reliability(*_calibrated(200), title=_LONG),
    "pictures": lambda: _illustrated(None),
    "pictures with names": lambda: _illustrated([f"a class of a long name {n}" for n in range(4)]),
    "roc": lambda: plots.roc({f"{_LONG} {n}": ([0, 0.5, 1], [0, 0.8, 1]) for n in range(3)}),
    "risk": lambda: plots.risk_coverage({f"m{n}": ([0.1, 1], [0, 0.1]) for n in range(12)}),
    "shift": lambda: plots.shift([0, 1, 2], {_LONG: torch.ones(2, 3)}, kind="rotation", measure="NLL"),
    "ellipse": lambda: plots.logit_ellipse(LogitGaussian(torch.zeros(1, 3), torch.eye(3)[None]), classes=(0, 1)),
    "choice": lambda: plots.choice(_choice(0)),
}


@pytest.mark.parametrize("draw", DRAWINGS.values(), ids=DRAWINGS)
def test_nothing_that_is_drawn_touches_the_border(draw: Callable[[], Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawn = draw()
    figure = drawn if isinstance(drawn, Figure) else drawn.figure
    figure.set_dpi(72)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).reshape(
        *canvas.get_width_height()[::-1], 4
    )[:, :, :3]
    assert int(pixels.min()) < 128  # something is drawn
    for border in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert int(border.min()) == 255


def test_a_grid_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="nothing to draw"):
        plots.reliability_grid({}, torch.tensor([0]))


def test_pmf_bars_and_error_bars_are_those_of_the_prediction(gaussian: LogitGaussian) -> None:
    prediction = gaussian.predict()
    ax = plots.pmf(prediction, 1, level=0.8)
    heights = [bar.get_height() for bar in ax.patches if isinstance(bar, Rectangle)]
    assert heights == pytest.approx(prediction.pmf[1].tolist())
    lower, upper = prediction.interval(0.8)
    lines = next(c for c in ax.collections if isinstance(c, LineCollection))
    segments = [tuple(segment[:, 1]) for segment in lines.get_segments()]
    for segment, low, high in zip(segments, lower[1].tolist(), upper[1].tolist(), strict=True):
        assert segment == pytest.approx((low, high))


def test_pmf_highlights_two_classes(gaussian: LogitGaussian) -> None:
    ax = plots.pmf(gaussian.predict(), 0, highlight=(2, 0), names=("a", "b", "c", "d"))
    colours = [bar.get_facecolor() for bar in ax.patches if isinstance(bar, Rectangle)]
    for colour, wanted in zip(colours, (plots.ORANGE, plots.GREY, plots.BLUE, plots.GREY), strict=True):
        assert same_color(colour, wanted)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "b", "c", "d"]


def test_a_mean_outside_its_own_interval_can_be_drawn() -> None:
    # 0.5 % of the samples make all of the mean of f_1, so a 95 % interval ends below it.
    skewed = LogitGaussian(torch.tensor([[0.0, -75.0]]), torch.tensor([[[0.0, 0.0], [0.0, 900.0]]]))
    prediction = skewed.predict()
    assert prediction.pmf[0, 1] > prediction.interval()[1][0, 1]
    plots.pmf(prediction).figure.draw_without_rendering()


def _ellipses(ax: Axes) -> list[Ellipse]:
    return [patch for patch in ax.patches if isinstance(patch, Ellipse)]


def _covariance(ellipse: Ellipse, sigma: float) -> Tensor:
    angle = math.radians(ellipse.angle)
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    variances = torch.tensor([ellipse.width, ellipse.height]).div(2 * sigma).square()
    return (rotation * variances) @ rotation.T


def test_ellipses_are_those_of_the_centred_covariance(gaussian: LogitGaussian) -> None:
    ax = plots.logit_ellipse(gaussian, 1, classes=(3, 0))
    centred = gaussian.centered()
    expected = centred.covariance[1][[3, 0]][:, [3, 0]].float()
    for sigma, ellipse in zip((1, 2), _ellipses(ax), strict=True):
        torch.testing.assert_close(_covariance(ellipse, sigma), expected)
        assert ellipse.center == pytest.approx(centred.mean[1, [3, 0]].tolist())


def test_a_common_shift_of_the_logits_changes_no_ellipse(gaussian: LogitGaussian) -> None:
    shifted = LogitGaussian(gaussian.mean + 7.0, gaussian.covariance + 1e4)
    for row in range(3):
        one, other = (_ellipses(plots.logit_ellipse(g, row, classes=(0, 1)))[0] for g in (gaussian, shifted))
        assert one.center == pytest.approx(other.center)
        torch.testing.assert_close(_covariance(one, 1), _covariance(other, 1), rtol=1e-4, atol=1e-4)


def test_samples_follow_the_gaussian_and_are_coloured_by_their_side(gaussian: LogitGaussian) -> None:
    count = 4000
    ax = plots.logit_ellipse(gaussian, 2, classes=(0, 1), samples=count)
    points = torch.as_tensor(ax.collections[0].get_offsets().data)
    centred = gaussian.centered()
    mean, covariance = centred.mean[2, :2], centred.covariance[2, :2, :2]
    spread = covariance.diagonal().sqrt()
    assert ((points.mean(0) - mean).abs() < 4 * spread / count**0.5).all()
    # Var of a sample covariance of Gaussians: (P_ii P_jj + P_ij²)/K.
    error = ((spread[:, None] * spread).square() + covariance.square()).div(count).sqrt()
    assert ((points.T.cov() - covariance).abs() < 4 * error).all()
    for (first, second), colour in zip(points[:50].tolist(), ax.collections[0].get_facecolor()[:50], strict=True):
        assert same_color(colour[:3], plots.BLUE if first > second else plots.ORANGE)


def test_a_certain_input_can_be_drawn() -> None:
    certain = LogitGaussian(torch.tensor([[1.0, -1.0]]), torch.zeros(1, 2, 2))
    plots.logit_ellipse(certain, classes=(0, 1)).figure.draw_without_rendering()


def test_figure_one_has_a_row_for_each_input_and_one_scale_for_all_ellipses(gaussian: LogitGaussian) -> None:
    prediction = gaussian.predict()
    figure = plots.figure_one(torch.rand(3, 8, 8), gaussian, prediction, titles=("a", "b", "c"))
    assert len(figure.axes) == 9
    planes, bars = figure.axes[1::3], figure.axes[2::3]
    assert len({(*ax.get_xlim(), *ax.get_ylim()) for ax in planes}) == 1
    for row, (plane, bar) in enumerate(zip(planes, bars, strict=True)):
        i, j = prediction.pmf[row].topk(2).indices.tolist()
        assert f"{{{i}}}" in plane.get_xlabel()
        assert f"{{{j}}}" in plane.get_ylabel()
        heights = [patch.get_height() for patch in bar.patches if isinstance(patch, Rectangle)]
        assert heights == pytest.approx(prediction.pmf[row].tolist())


def test_figure_one_refuses_what_does_not_belong_together(gaussian: LogitGaussian) -> None:
    with pytest.raises(ArgumentError, match="got 2, 3 and 3"):
        plots.figure_one(torch.rand(2, 8, 8), gaussian, gaussian.predict())


def test_a_diagram_needs_only_its_values() -> None:
    pmf, labels = _pmf_and_labels()
    drawn, again = plots.reliability(pmf, labels), plots.diagram(metrics.reliability(pmf, labels), note="a note")
    boxes = [[bar.get_bbox().bounds for bar in ax.patches if isinstance(bar, Rectangle)] for ax in (drawn, again)]
    assert boxes[0] == boxes[1]
    assert [text.get_text() for text in again.texts] == ["a note"]


def test_many_classes_are_numbered_and_the_highlighted_ones_named() -> None:
    many = LogitGaussian(torch.zeros(1, 43), torch.eye(43)[None])
    names = [f"sign {number}" for number in range(43)]
    ax = plots.pmf(many.predict(), highlight=(14, 15), names=names)
    assert ax.get_xticks().tolist() == list(range(0, 43, 5))
    assert [text.get_text() for text in ax.texts] == ["14 sign 14", "15 sign 15"]


def test_figure_one_draws_colours(gaussian: LogitGaussian) -> None:
    figure = plots.figure_one(torch.rand(3, 8, 8, 3), gaussian, gaussian.predict(), names=("ant", "bee", "crab", "dog"))
    assert [ax.images[0].get_array().shape for ax in figure.axes[::3]] == [(8, 8, 3)] * 3  # type: ignore[union-attr]
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["ant", "bee", "crab", "dog"]


def test_shift_draws_means_and_one_standard_deviation() -> None:
    runs = torch.tensor([[1.0, 2.0, 4.0], [3.0, 2.0, 8.0]])
    ax = plots.shift([0, 1, 2], {"a": runs, "b": runs[:1]}, kind="blur", measure="NLL")
    assert [line.get_ydata().tolist() for line in ax.lines] == [[2.0, 2.0, 6.0], [1.0, 2.0, 4.0]]  # type: ignore[union-attr]
    (band,) = ax.collections
    corners = {(float(x), round(float(y), 4)) for x, y in band.get_paths()[0].vertices}
    deviation = 2**0.5
    assert {(0.0, round(2 - deviation, 4)), (2.0, round(6 + 2 * deviation, 4))} <= corners
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("blur", "NLL")


def test_roc_says_the_area_under_each_curve() -> None:
    curves = {"a": ([0.0, 0.5, 1.0], [0.0, 1.0, 1.0]), "b": ([0.0, 1.0], [0.0, 1.0])}
    legend = plots.roc(curves).get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a (AUROC 0.750)", "b (AUROC 0.500)"]
    legend = plots.roc(curves, areas={"a": 0.8, "b": 0.4}).get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["a (AUROC 0.800)", "b (AUROC 0.400)"]


def test_risk_coverage_draws_where_it_is_told_to_and_keeps_its_key_off_the_data() -> None:
    ax = _axes()
    assert plots.risk_coverage({"a": ([0.5, 1.0], [0.0, 0.1])}, ax=ax) is ax
    assert ax.lines[0].get_xydata().tolist() == [[0.5, 0.0], [1.0, 0.1]]  # type: ignore[union-attr]
    ax.figure.draw_without_rendering()  # type: ignore[union-attr]
    legend = ax.get_legend()
    assert legend is not None
    assert legend.get_window_extent().y0 > ax.get_window_extent().y1


def test_styles_differ_in_more_than_colour() -> None:
    styles = plots.styles(f"method {number}" for number in range(100))
    assert len(set(styles.values())) == 100
    assert len({(style.dash, style.marker) for style in list(styles.values())[:35]}) == 35


@pytest.mark.parametrize("draw", [plots.roc, plots.risk_coverage, lambda nothing: plots.shift([0], nothing)])
def test_curves_of_nothing_are_refused(draw: Callable[[dict[str, Any]], Axes]) -> None:
    with pytest.raises(ArgumentError, match="nothing to draw"):
        draw({})


def test_curves_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"shape \(1, 3\); expected \(runs, 2\)"):
        plots.shift([0, 1], {"a": torch.zeros(1, 3)})
    for draw in (plots.roc, plots.risk_coverage):
        with pytest.raises(ArgumentError, match="'a' has 2 x and 1 y"):
            draw({"a": ([0.0, 1.0], [0.0])})
        with pytest.raises(ArgumentError, match="no style for 'a'"):
            draw({"a": ([0.0, 1.0], [0.0, 1.0])}, looks=plots.styles("b"))


@pytest.mark.parametrize("index", [3, -4])
def test_an_input_that_is_not_there_is_refused(index: int, gaussian: LogitGaussian) -> None:
    with pytest.raises(ArgumentError, match=r"lies in 0 … 2; got"):
        plots.logit_ellipse(gaussian, index, classes=(0, 1))
    with pytest.raises(ArgumentError, match=r"lies in 0 … 2; got"):
        plots.pmf(gaussian.predict(), index)


def test_without_matplotlib_the_figures_say_what_to_install(
    gaussian: LogitGaussian, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (
        lambda: plots.reliability(*_pmf_and_labels()),
        lambda: plots.reliability_grid({"a": _pmf_and_labels()[0]}, _pmf_and_labels()[1]),
        lambda: plots.pmf(gaussian.predict()),
        lambda: plots.logit_ellipse(gaussian, classes=(0, 1)),
        lambda: plots.figure_one(torch.rand(3, 8, 8), gaussian, gaussian.predict()),
        lambda: plots.roc({"a": ([0.0, 1.0], [0.0, 1.0])}),
    ):
        with pytest.raises(MissingExtraError, match=r"pip install '\.\[plots\]'"):
            draw()


def test_figures_never_touch_pyplot() -> None:
    program = (
        "import sys, torch; from errbar import plots; assert 'matplotlib' not in sys.modules; "
        "plots.reliability(torch.tensor([[0.9, 0.1]]), torch.tensor([0])); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# ---------------------------------------------------------------------------------------------------------- autofit


def _row(name: str, difference: float, half: float, **facts: Any) -> Row:
    usual: dict[str, Any] = {"structure": "dense", "link": "T, T_c", "prior_by": "evidence"}
    numbers = ("temperature", "covariance_scale", "softening", "prior", "nll", "standard_error", "ece", "brier")
    rest = dict.fromkeys((*numbers, "seconds", "microseconds", "bytes", "n_parameters"), 0)
    interval = (difference - half, difference + half)
    given = usual | rest | {"fisher": "ggn", "exact": True} | facts
    return Row(parameters=name, difference=difference, interval=interval, **given)


def _choice(chosen: int | None) -> Choice:
    rows = (
        _row("last layer", -0.02, 0.01),
        _row("all", -0.01, 0.005, structure="kron", link="T, T_c, c", prior_by="nll"),
        _row("last two layers", 0.03, 0.1),
    )
    baselines = (_row("softmax", 2.0, 0.5, structure="", link=""), _row("T alone", 0.0, 0.0, structure="", link="T"))
    nothing: Any = None
    row = None if chosen is None else rows[chosen]
    return Choice(nothing, rows, baselines, row, "Because.", (), nothing)


def test_the_picture_of_a_choice_shows_each_difference_with_its_interval_and_marks_the_chosen_one() -> None:
    ax = plots.choice(_choice(1))
    texts = [text.get_text() for text in ax.get_yticklabels()]
    assert texts[0] == "softmax"
    assert texts[1] == "last layer, dense; $T$, $T_c$; prior by evidence"
    assert texts[2] == "all, kron; $T$, $T_c$, $c$; prior by NLL"
    assert [text.get_fontweight() for text in ax.get_yticklabels()] == ["normal", "normal", "bold", "normal"]
    points = {int(line.get_ydata()[0]): line for line in ax.lines if line.get_marker() == "o"}
    assert {place: line.get_xdata()[0] for place, line in points.items()} == {1: -0.02, 2: -0.01, 3: 0.03}
    assert [same_color(points[place].get_markerfacecolor(), plots.BLUE) for place in (1, 2, 3)] == [False, True, False]
    # Worse than temperature scaling by more than 3e-4.
    assert same_color(points[3].get_color(), plots.VERMILION)
    spans = {int(line.get_ydata()[0]): list(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2}
    assert spans[1] == pytest.approx([-0.03, -0.01])
    assert spans[2] == pytest.approx([-0.015, -0.005])
    # The softmax is far to the right: an arrow at the edge, as at the ends of a wide interval.
    low, high = ax.get_xlim()
    arrows = {(int(line.get_ydata()[0]), line.get_marker(), line.get_xdata()[0]) for line in ax.lines}
    assert {(0, ">", high), (3, ">", high), (3, "<", low)} <= arrows
    assert low < -0.03 < 0.03 < high < 0.1


def test_the_picture_of_a_choice_is_whole() -> None:
    for chosen in (0, None):
        ax = plots.choice(_choice(chosen))
        figure = ax.figure
        figure.draw_without_rendering()
        low, high = ax.get_xlim()
        # Ticks beyond the ends are there, but not drawn.
        ticks = [text for text in ax.get_xticklabels() if low <= text.get_position()[0] <= high]
        texts = [*ax.get_yticklabels(), *ticks, ax.xaxis.label]
        for text in texts:
            box = text.get_window_extent()
            assert 0 <= box.x0 < box.x1 <= figure.bbox.width
            assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    assert all(text.get_fontweight() == "normal" for text in ax.get_yticklabels())


def test_the_picture_of_a_choice_wants_a_choice() -> None:
    with pytest.raises(ArgumentError, match="choice is a str; expected what errbar"):
        plots.choice("last layer")  # type: ignore[arg-type]
