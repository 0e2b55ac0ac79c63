"""The figures of an experiment come from its result alone, and the same result gives the same files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from errbar.errors import DataError
from errbar.experiments import acquiring, figure_values, figures

METHODS = {"standard": "(i) standard", "proposed_tc": "(vi) proposed, T_c", "new_one": "another"}
DRAWN = [name for name in figures.FIGURES if name != "shift-all"]  # which takes more methods than are here


def _run(seed: int) -> dict[str, Any]:
    moved = 0.01 * seed
    diagram = {
        "count": [0] * 8 + [10, 30],
        "accuracy": [None] * 8 + [0.7, 0.9 + moved],
        "confidence": [None] * 8 + [0.85, 0.95],
    }
    curve = {"fpr": [0.0, 0.5, 1.0], "tpr": [0.0, 0.8 + moved, 1.0], "auroc": 0.65 + moved}
    falling = {method: [0.9 - moved, 0.5] for method in METHODS}
    return {
        "seed": seed,
        "acquired": {
            "labels": [20, 40, 60],
            "curves": {
                rule: {"accuracy": [0.3, 0.5, 0.6 + moved + 0.01 * n]} for n, rule in enumerate(acquiring.RULES)
            },
        },
        "reliability": dict.fromkeys(METHODS, diagram),
        "roc": {"letters": {"proposed_tc · entropy": curve, "stranger · entropy": curve}, "noise": {"another": curve}},
        "shift": {
            "rotation": {"severity": [0, 30], "nll": falling, "ece": falling, "accuracy": falling},
            "blur": {"severity": [0, 1], "nll": falling},
        },
        "risk_coverage": {"standard": {"coverage": [0.5, 1.0], "risk": [0.0, 0.1 + moved]}},
        "scale_curve": {
            "covariance_scale": [0.0, 0.1, 1.0, 10.0],
            "nll": [0.9, 0.4, 0.3, 0.5],
            "ece": [0.9, 0.1, 0.2, 0.3],
            "chosen": {"nll": 1.0, "ece": 0.1},
        },
    }


def _result(seeds: int = 2, channels: int = 1) -> dict[str, Any]:
    """A tiny result, as its JSON file would give it back."""
    draws = torch.Generator().manual_seed(0)
    pmf = torch.rand(3, 3, generator=draws).softmax(1).tolist()
    scores = {"accuracy": [0.7, 0.8, 0.9], "nll": [0.5, 0.4, 0.3], "ece": [0.1, 0.1, 0.2]}
    one = {
        "image": torch.rand(channels, 4, 4, generator=draws).tolist(),
        "mean": [0.0, 1.0, 2.0],
        "covariance": torch.eye(3).tolist(),
        "label": 2,
    }
    strip = {"images": torch.rand(3, channels, 4, 4, generator=draws).tolist(), "pmf": {"last": pmf}, "label": 1}
    result = {
        "experiment": "tiny",
        "methods": METHODS,
        "runs": [_run(seed) for seed in range(seeds)],
        "illustration": [one, one],
        "class_names": ["cat", "dog", "horse"],
        "fusion": {"sequences": {"frames": [1, 2, 3], "methods": {"last": scores, "fused": scores}}, "strip": strip},
    }
    read: dict[str, Any] = json.loads(json.dumps(result))
    return read


def _text(figure: Figure) -> str:
    texts = [text.get_text() for ax in figure.axes for text in (*ax.texts, ax.xaxis.label, ax.title)]
    return "\n".join([*texts, *(text.get_text() for legend in figure.legends for text in legend.get_texts())])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return figures.draw(_result(), tmp_path_factory.mktemp("figures") / "new")


def test_every_figure_is_a_pdf_and_a_png(drawn: list[Path]) -> None:
    assert [path.name for path in drawn] == [f"tiny-{name}.{kind}" for name in DRAWN for kind in ("pdf", "png")]
    for path in drawn:
        start = b"%PDF-" if path.suffix == ".pdf" else b"\x89PNG\r\n\x1a\n"
        assert path.read_bytes().startswith(start)
        assert path.stat().st_size > 3000


def test_fonts_are_embedded_as_outlines_and_no_date_is_written(drawn: list[Path]) -> None:
    for path in drawn:
        if path.suffix == ".pdf":
            assert b"/Type3" not in path.read_bytes()
            assert b"/FontFile2" in path.read_bytes()
            assert b"CreationDate" not in path.read_bytes()


def test_another_process_draws_the_same_bytes(drawn: list[Path], tmp_path: Path) -> None:
    # With other hashes of strings: an order taken from a set would show.
    result = {**_result(), "runs": []}
    (tmp_path / "result.json").write_text(json.dumps(result))
    program = (
        "import json, sys; from pathlib import Path; from errbar.experiments.figures import draw; "
        "folder = Path(sys.argv[1]); draw(json.loads((folder / 'result.json').read_text()), folder)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment, timeout=120)
    again = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix != ".json"}
    assert sorted(again) == [f"tiny-{name}.{kind}" for name in ("figure-one", "fusion") for kind in ("pdf", "png")]
    assert again == {path.name: path.read_bytes() for path in drawn if path.name in again}


@pytest.mark.parametrize(
    ("part", "left"),
    [
        ("illustration", "figure-one"),
        ("fusion", "fusion"),
        ("reliability", "reliability reliability-all"),
        ("roc", "roc"),
        ("shift", "shift"),
        ("scale_curve", "covariance-scale"),
        ("risk_coverage", "risk-coverage"),
    ],
)
def test_what_is_there_is_drawn_and_nothing_else(part: str, left: str) -> None:
    whole = _result(seeds=1)
    result = {"experiment": "part", "methods": METHODS, "runs": [{"seed": 0}]}
    if part in whole:
        result[part] = whole[part]
    else:
        result["runs"] = [{"seed": 0}, {"seed": 1, part: whole["runs"][0][part]}]
    assert [name for name, make in figures.FIGURES.items() if make(result) is not None] == left.split()


def test_of_nothing_nothing_is_drawn(tmp_path: Path) -> None:
    assert figures.draw({"experiment": "none", "methods": {}, "runs": []}, tmp_path) == []


def test_half_of_the_fusion_can_be_missing() -> None:
    for part in ("sequences", "strip"):
        result = _result()
        del result["fusion"][part]
        figure = figures.fusion(result)
        assert figure is not None
        figure.draw_without_rendering()


def test_all_methods_are_not_drawn_again_when_they_are_those_of_the_paper() -> None:
    result = _result()
    for run in result["runs"]:
        del run["reliability"]["new_one"]
    assert figures.reliability(result) is not None
    assert figures.reliability(result, everything=True) is None


def _names(figure: Figure | None) -> list[str]:
    assert figure is not None
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_of_many_methods_the_main_ones_are_drawn_first_and_all_in_a_second_figure() -> None:
    result = _result(seeds=1)
    result["methods"] = {key: key for key in (*figure_values.KNOWN, "new_one")}
    curves = {key: [0.1, 0.2] for key in result["methods"]}
    result["runs"][0]["shift"] = {"blur": {"severity": [0, 1], "nll": curves}}
    assert _names(figures.shift(result)) == list(figure_values.MAIN)
    assert _names(figures.shift(result, everything=True)) == list(result["methods"])
    strangers = [f"method {number}" for number in range(12)]
    assert figure_values.shown(strangers, everything=False) == strangers[:9]


def test_of_many_outlier_scores_a_selection_is_drawn_with_the_areas_of_all_seeds() -> None:
    result = _result()
    curve = result["runs"][0]["roc"]["noise"]["another"]
    scores = ("entropy", "maximum probability", "mutual information")
    result["runs"][0]["roc"] = {"noise": {f"{key} · {s}": curve for key in figure_values.KNOWN for s in scores}}
    del result["runs"][1]["roc"]
    for run, area in zip(result["runs"], (0.8, 0.9), strict=True):
        run["outliers"] = {"noise": {"entropy": {"both": area}}}
    curves = figure_values.roc_curves(result)["noise"]
    assert len(curves) == 10
    assert curves["both · entropy"].areas.tolist() == [0.8, 0.9]
    assert curves["both · mutual information"].areas.tolist() == [curve["auroc"]]


def test_an_ece_is_in_per_cent_in_the_runs_and_a_fraction_in_the_fusion() -> None:
    result = _result(seeds=1)
    for figure, name, measure, height in (
        (figures.shift(result), "another", "ECE (%)", 0.9),
        (figures.fusion(result), "fused", "ECE (%)", 10.0),
    ):
        assert figure is not None
        (ax,) = (ax for ax in figure.axes if ax.get_ylabel() == measure)
        (line,) = (line for line in ax.lines if line.get_label() == name)
        assert float(line.get_xydata()[0, 1]) == pytest.approx(height)  # type: ignore[index]


def test_panels_of_one_row_have_one_scale_that_holds_all_of_them() -> None:
    result = _result(seeds=1)
    result["runs"][0]["shift"]["blur"]["ece"] = {"standard": [3.0, 40.0]}
    figure = figures.shift(result)
    assert figure is not None
    limits = {ax.get_ylim() for ax in figure.axes[2:4]}
    assert len(limits) == 1
    assert limits.pop()[1] > 40.0


def test_colour_pictures_are_drawn_in_colour() -> None:
    figure = figures.illustration(_result(channels=3))
    assert figure is not None
    shapes = [image.get_array().shape for ax in figure.axes for image in ax.images]  # type: ignore[union-attr]
    assert shapes == [(4, 4, 3)] * 2
    assert "label horse" in _text(figure)


def test_a_picture_of_two_channels_is_refused() -> None:
    with pytest.raises(DataError, match=r"shape \(2, 4, 4\); expected \(1, H, W\)"):
        figures.illustration(_result(channels=2))


def test_a_covariance_that_was_rounded_to_float32_can_be_drawn() -> None:
    result = _result()
    root = torch.randn(3, 1, generator=torch.Generator().manual_seed(0))
    result["illustration"][0]["covariance"] = (root @ root.T).tolist()
    assert figures.illustration(result) is not None


def test_pooling_over_seeds_adds_the_counts() -> None:
    pooled = figure_values.reliability(_result())["standard"]
    assert pooled.diagram.count.tolist() == [0] * 8 + [20, 60]
    assert pooled.diagram.accuracy[8:].tolist() == pytest.approx([0.7, 0.905])
    assert pooled.diagram.confidence[8:].tolist() == pytest.approx([0.85, 0.95])
    # Seeds: (10 · 0.15 + 30 · 0.05)/40 and (10 · 0.15 + 30 · 0.04)/40.
    assert pooled.ece.tolist() == pytest.approx([0.075, 0.0675])
    assert pooled.note == "ECE 7.1 ± 0.5 %"


def test_roc_curves_are_averaged_at_each_false_positive_rate() -> None:
    curve = figure_values.roc_curves(_result())["letters"]["proposed_tc · entropy"]
    assert dict(zip(curve.x, curve.y, strict=True)) == pytest.approx({0.0: 0.0, 0.5: 0.805, 1.0: 1.0})
    figure = figures.roc(_result())
    assert figure is not None
    assert "0.655 ± 0.007" in _text(figure)
    assert "(vi) proposed, $T_c$ · entropy" in _text(figure)


def test_the_chosen_scales_are_marked_on_the_curves_of_their_seeds() -> None:
    curves = figure_values.scale_curves(_result())
    assert curves is not None
    assert curves.scale.tolist() == [0.1, 1.0, 10.0]
    assert curves.at_chosen("ece", by="nll").tolist() == pytest.approx([0.2, 0.2])
    assert curves.at_chosen("nll", by="ece").tolist() == pytest.approx([0.4, 0.4])


def _colours(axes: list[Axes], name: str) -> set[Any]:
    return {line.get_color() for ax in axes for line in ax.lines if line.get_label() == name}


def test_a_method_has_one_style_in_all_figures_and_unknown_ones_have_one_too() -> None:
    result = _result()
    looks = figure_values.looks(result)
    assert looks["proposed_tc"] == looks["(vi) proposed, $T_c$"]
    compared = [looks[name] for name in (*figure_values.KNOWN, "new_one", "last", "fused")]
    assert len(set(compared)) == len(compared)
    shift = figures.shift(result)
    assert shift is not None
    for key, name in METHODS.items():
        (colour,) = _colours(shift.axes, figure_values.readable(name))
        assert same_color(colour, looks[key].color)
    # The same in an experiment with other methods.
    fewer = {**result, "methods": {"proposed_tc": "ours"}}
    assert figure_values.looks(fewer)["ours"] == looks["proposed_tc"]


def test_seeds_with_other_severities_are_refused() -> None:
    result = _result()
    result["runs"][1]["shift"]["blur"]["severity"] = [0, 2]
    with pytest.raises(DataError, match="different severities of 'blur'"):
        figures.shift(result)


@pytest.mark.parametrize("part", ["experiment", "methods", "runs"])
def test_what_is_not_a_result_is_refused(part: str, tmp_path: Path) -> None:
    result = _result()
    del result[part]
    with pytest.raises(DataError, match=f"NoneType as '{part}'; expected a"):
        figures.draw(result, tmp_path)
