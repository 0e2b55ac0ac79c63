"""The plan: what it lists, that it is true, that it is what `auto` and refusals go by."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._base import linalg
from errbar._base.memory import available_bytes
from errbar._curvature.fisher import comes_apart_by_class
from errbar._curvature.layout import inspect
from errbar._curvature.registry import structure_called
from errbar._curvature.workload import LayerSize, Workload
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection
from errbar.experiments.resnet import cifar_resnet
from networks import perceptron
from places import ROOT

STRUCTURES = ("dense", "block", "kron", "lowrank", "diag")


def only(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let the machine have so many bytes."""
    monkeypatch.setattr("errbar._base.memory.available_bytes", lambda device: size)
    monkeypatch.setattr("errbar._planning.choice.available_bytes", lambda device: size)


def tempered() -> nn.Module:
    """A learned temperature, a parameter of the model itself, after a layer."""

    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.tensor(0.3))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale.exp()

    return Tempered()


# ------------------------------------------------------------------------------------------------------- what is listed


def test_structures_are_listed_for_the_last_layers_all_vectors_and_all_parameters() -> None:
    plan = errbar.plan(perceptron(6, 5, 4, 3), torch.zeros(8, 6))
    # `block` of a single layer is `dense`, so it is not listed.
    single = [name for name in STRUCTURES if name != "block"]
    asked: list[tuple[int | None, str | None]] = [(2, None), (None, "vectors"), (3, "all")]
    expected = [(1, None, name) for name in single] + [(*names, s) for names in asked for s in STRUCTURES]
    assert [(o.last_layers, o.parameters, o.structure) for o in plan.options] == expected
    assert [o.n_parameters for o in plan.options if o.structure == "dense"] == [15, 39, 24, 74]
    assert [o.exact for o in plan.options if o.parameters == "all"] == [True, False, False, False, False]
    assert all(o.fits for o in plan.options)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ((4, 3), [(1, "all")]),
        ((4, 4, 3), [(1, None), (None, "vectors"), (2, "all")]),
        ((4,) * 5, [(1, None), (2, None), (None, "vectors"), (4, "all")]),
        ((4,) * 12, [(1, None), (2, None), (4, None), (None, "vectors"), (11, "all")]),
    ],
    ids=["one layer", "two", "four", "eleven"],
)
def test_a_selection_with_two_names_is_listed_once(
    widths: tuple[int, ...], expected: list[tuple[int | None, str | None]]
) -> None:
    plan = errbar.plan(perceptron(*widths), torch.zeros(8, 4))
    assert list(dict.fromkeys((o.last_layers, o.parameters) for o in plan.options)) == expected


@pytest.mark.parametrize(
    ("asked", "n_parameters"),
    [
        ({"last_layers": 3}, 15 + 24 + 35),
        ({"last_layers": 2}, 15 + 24),
        ({"parameters": "vectors"}, 15 + 4 + 5),
        ({"parameters": "all"}, 74),
        ({"parameters": ["0"]}, 35),
        ({"parameters": ["0", "2.bias"]}, 39),
    ],
    ids=str,
)
def test_a_plan_is_about_what_is_asked(asked: dict[str, Any], n_parameters: int) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = perceptron(6, 5, 4, 3)
    plan = errbar.plan(model, x, **asked)
    assert {o.n_parameters for o in plan.options} == {n_parameters}
    assert len(plan.options) in (4, 5)
    assert errbar.collect(model, [x], **asked).n_parameters == n_parameters
    best = plan.best_for(**asked)
    assert best is not None
    assert best == plan.best
    (one,) = errbar.plan(model, x, **asked, structure="block").options
    assert (one.structure, one.n_parameters) == ("block", n_parameters)


def test_a_restricted_plan_has_the_same_bytes() -> None:
    model, x = perceptron(6, 5, 4, 3), torch.zeros(8, 6)
    whole = errbar.plan(model, x)
    (part,) = errbar.plan(model, x, last_layers=2, structure="kron").options
    (same,) = [o for o in whole.options if (o.last_layers, o.structure) == (2, "kron")]
    for name in ("posterior_bytes", "fit_bytes", "predict_bytes", "n_parameters", "exact", "diagonal"):
        assert getattr(part, name) == getattr(same, name)


def test_a_plan_says_how_predictions_are_made() -> None:
    """K draws pushed forward take 1.5 passes each, a class 2 (`_curvature.workload`); a last layer takes neither."""
    model, x = perceptron(6, 8, 50), torch.zeros(4, 6)
    few, many = errbar.plan(model, x, samples=10), errbar.plan(model, x, samples=1000)
    assert {o.predicts_by for o in few.options if o.parameters == "all"} == {"draws"}
    assert {o.predicts_by for o in many.options} == {"logits"}
    # The rows of Jacobians of a sketch are a backward pass for each class, also those of a last layer.
    last = {o.structure: o.predicts_by for o in few.options if o.last_layers == 1}
    assert last == {"dense": "logits", "kron": "logits", "lowrank": "draws", "diag": "logits"}
    assert "* predict pushes draws of the parameters forward" in str(few)
    assert "*" not in str(many)


class Counting(nn.Module):
    """Counts the samples of its passes, the passes, and those backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = perceptron(6, 5, 4, 3)
        self.samples: list[int] = []
        self.backward: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.samples.append(len(x))
        out: Tensor = self.inside(x)
        if out.requires_grad:
            out.register_hook(lambda _: self.backward.append(1))
        return out


@pytest.mark.parametrize("fisher", ["ggn", "eta", "sampled"])
@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_a_plan_takes_less_than_five_passes_and_none_backward(size: int, fisher: str) -> None:
    model = Counting()
    # The replica that runs shares these lists only if they are not copied with it.
    samples, backward = _Shared(), _Shared()
    model.__dict__.update(samples=samples, backward=backward)
    errbar.plan(model, torch.zeros(size, 6), fisher=fisher)
    assert 0 < len(samples.values) <= 5
    assert sum(samples.values) <= 5 * size
    assert not backward.values


class _Shared:
    """A list that is no list, so that copies of the model share it."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def append(self, value: int) -> None:
        self.values.append(value)


def test_the_hook_of_that_test_sees_backward_passes() -> None:
    model = Counting()
    model(torch.zeros(2, 6)).sum().backward()
    assert (model.samples, model.backward) == ([2], [1])


def test_a_parameter_of_the_model_itself_is_taken_to_be_used_from_the_start() -> None:
    network = Network(tempered())
    batch = Batch((torch.zeros(8, 4),))
    seen = inspect(network, batch).layout
    own = Selection(("scale",), ((),))
    assert [event.module for event in seen.tail(own)] == ["layer"]
    assert seen.workload(own, batch=8, fisher="ggn", dtype=torch.float32, rank=5).tail_bytes == 4 * 3


def test_all_parameters_are_listed_where_they_are_more_than_the_layers() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.shift = nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(x + self.shift)
            return out

    plan = errbar.plan(Shifted(), torch.zeros(2, 4))
    counts = {(o.last_layers, o.n_parameters) for o in plan.options}
    # The model has a parameter of its own and contains a layer that ran: it is not a layer itself.
    assert counts == {(1, 15), (None, 19)}
    assert plan.best is not None
    assert plan.best.last_layers is None


@pytest.mark.parametrize("form", ["x", "pair", "mapping"])
def test_an_example_has_any_form_that_collect_takes(form: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, pixels: Tensor) -> Tensor:
            out: Tensor = self.layer(pixels)
            return out

    x = torch.zeros(7, 4)
    example = {"x": x, "pair": (x, torch.zeros(7)), "mapping": {"pixels": x, "labels": torch.zeros(7)}}[form]
    plan = errbar.plan(Named(), example)
    assert (len(plan.options), plan.batch) == (4, 7)


def test_what_fits_nowhere_is_planned_without_being_made() -> None:
    plan = errbar.plan(nn.Linear(4999, 2000), torch.zeros(2, 4999))  # 10 million parameters: dense is 728 TiB
    dense, kron = plan.options[:2]
    assert dense.posterior_bytes == 2 * 8 * 10_000_000**2
    assert not dense.fits
    assert kron.fits == (max(kron.fit_bytes, kron.predict_bytes) <= plan.memory)


def test_values_are_frozen_and_the_model_is_not_touched() -> None:
    model = perceptron(6, 5, 3).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = errbar.plan(model, torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(dataclasses.FrozenInstanceError, match="memory"):
        plan.memory = 1  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="fits"):
        plan.options[0].fits = False  # type: ignore[misc]


def test_the_table_is_narrow_and_short_also_for_deep_networks() -> None:
    plan = errbar.plan(cifar_resnet(20), torch.zeros(4, 3, 32, 32), memory=2**30)
    lines = str(plan).splitlines()
    assert max(len(line) for line in lines) <= 100
    # With a row and a remark for each mixture.
    assert len(lines) <= 27 + 2 * sum(" mixed ~ " in line for line in lines)
    assert lines[1].split()[:3] == ["layers", "parameters", "structure"]
    table = lines[2 : next(row for row, line in enumerate(lines) if line.startswith("~"))]
    assert [line.split()[0] for line in table if line[0] != " "] == ["1", "2", "4", "vectors", "all"]
    assert sum(line.endswith("auto") for line in lines) == 1
    assert any(line.endswith("no") for line in lines)
    # The same number of lines for a network of two hundred layers.
    deep = str(errbar.plan(perceptron(*[3] * 201), torch.zeros(4, 3))).splitlines()
    assert len(deep) <= 27
    assert max(len(line) for line in deep) <= 100


def test_the_table_of_long_names_is_narrow() -> None:
    model = nn.Sequential(OrderedDict({"a_module_with_a_name_of_many_words": nn.Linear(4, 3)}))
    lines = str(errbar.plan(model, torch.zeros(4, 4), parameters="a_module_with_a_name_of_many_words")).splitlines()
    assert max(len(line) for line in lines) <= 100
    assert lines[2].startswith("named ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"memory": 0}, r"memory is 0; expected a whole number of bytes"),
        ({"memory": 1.5}, r"memory is 1.5; expected a whole number of bytes"),
        ({"rank": 0}, r"rank is 0; expected a whole number of one or more"),
        ({"samples": 0}, r"samples is 0; expected"),
        ({"fisher": "gauss"}, r"fisher is 'gauss'; expected 'ggn'"),
        ({"precision": "half"}, r"precision is 'half'; expected None or 'float64'"),
        ({"structure": "exact"}, r"structure is 'exact'; expected 'dense' or"),
        ({"last_layers": 2}, r"last_layers is 2, but only 1 layers with parameters ran"),
        ({"last_layers": 1, "parameters": "all"}, r"exactly one of last_layers= and parameters=, got both"),
        ({"parameters": "head"}, r"No parameter is called 'head'"),
    ],
)
def test_what_cannot_be_planned_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(errbar.ArgumentError, match=message):
        errbar.plan(perceptron(4, 3), torch.zeros(2, 4), **given)  # type: ignore[arg-type]


def test_layers_that_are_not_there_have_no_best() -> None:
    plan = errbar.plan(perceptron(4, 3, 2), torch.zeros(2, 4))
    sentence = r"last_layers is 3; the plan is about 1, vectors, all. Use errbar.plan\(..., last_layers=3\)"
    with pytest.raises(errbar.ArgumentError, match=sentence):
        plan.best_for(3)
    with pytest.raises(errbar.ArgumentError, match=r"parameters is \('0',\); the plan is about 1, vectors, all"):
        plan.best_for(parameters=["0"])


# -------------------------------------------------------------------------------- auto and refusals


def test_auto_is_silent_and_exact_where_dense_fits() -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = errbar.fit(perceptron(6, 5, 3), [x], last_layers=2, structure="auto")
    assert posterior.information.structure == "dense"


@pytest.mark.parametrize("expected", ["block", "kron", "lowrank", "diag"])
def test_auto_takes_the_first_that_fits_and_says_so(expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron(100, 20, 20, 10)
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(0))
    plan = errbar.plan(model, x, rank=2)
    peaks = {o.structure: max(o.fit_bytes, o.predict_bytes) for o in plan.options if o.last_layers == 3}
    earlier = STRUCTURES[: STRUCTURES.index(expected)]
    if peaks[expected] >= min(peaks[name] for name in earlier):
        # It can never be taken here, because something better is smaller.
        assert expected in ("lowrank", "diag")
        return
    only(monkeypatch, int(peaks[expected] / 0.9) + 1000)
    with pytest.warns(errbar.StructureNotice, match=f"'auto' chose '{expected}', which is not exact: .* would take"):
        information = errbar.collect(model, [x], parameters="all", structure="auto", rank=2)
    assert information.structure == expected
    best = errbar.plan(model, x, rank=2).best
    assert best is not None
    assert best.structure == expected
    monkeypatch.undo()
    named = errbar.collect(model, [x], parameters="all", structure=expected, rank=2)
    torch.testing.assert_close(named.dense(), information.dense())


def test_what_auto_chose_is_not_refused_when_others_take_some_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron(100, 10)
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(0))
    peak = next(o for o in errbar.plan(model, x, structure="dense").options if o.last_layers == 1)
    left = 1.02 * max(peak.fit_bytes, peak.predict_bytes) / 0.9

    def less_each_time(device: torch.device) -> int:
        nonlocal left
        left *= 0.99
        return int(left)

    monkeypatch.setattr("errbar._base.memory.available_bytes", less_each_time)
    monkeypatch.setattr("errbar._planning.choice.available_bytes", less_each_time)
    assert errbar.collect(model, [x], last_layers=1, structure="auto").structure == "dense"


def test_auto_is_refused_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 1000)
    with pytest.raises(
        errbar.SizeError, match=r"No structure fits: even structure='\w+' of 33 parameters needs .*more"
    ):
        errbar.fit(perceptron(10, 3), [torch.zeros(4, 10)], last_layers=1, structure="auto")


def test_a_refusal_names_what_fits_and_that_does_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = perceptron(300, 30, 30, 10)
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(0))
    only(monkeypatch, 200 * 2**20)
    with pytest.raises(errbar.SizeError, match="what fits is") as caught:
        errbar.fit(model, [x], last_layers=3)
    message = str(caught.value)
    found = re.fullmatch(
        r"structure='dense' of 10,270 parameters needs 2\.\d GiB on cpu, and 200\.0 MiB are available; what fits is "
        r"structure='(auto)', which takes kron \(0\) and block \(the rest\) \([\d.]+ MiB\) or last_layers=(\d) with "
        r"structure='dense'\.",
        message,
    )
    assert found is not None, message
    other, layers = found.group(1), int(found.group(2))
    with pytest.warns(
        errbar.StructureNotice, match=r"'auto' chose kron \(0\) and block \(the rest\), which is not exact"
    ):
        assert errbar.fit(model, [x], last_layers=3, structure=other).information.structure == "0=kron,*=block"
    errbar.fit(model, [x], last_layers=layers)
    with pytest.raises(errbar.SizeError, match="structure='dense'"):
        errbar.fit(model, [x], last_layers=layers + 1)


def test_an_update_is_refused_by_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(0))
    posterior = errbar.fit(perceptron(100, 10), [x], last_layers=1)
    only(monkeypatch, 10**6)
    with pytest.raises(errbar.SizeError, match=r"structure='dense' of 1,010 parameters needs .* MiB on cpu, and 976"):
        posterior.update([x])


def test_memory_that_is_given_is_taken_at_its_word() -> None:
    plan = errbar.plan(perceptron(100, 10), torch.zeros(8, 100), memory=20 * 2**20)
    assert plan.memory == 20 * 2**20
    for option in plan.options:
        assert option.fits == (max(option.fit_bytes, option.predict_bytes) <= 20 * 2**20)
    assert errbar.plan(perceptron(4, 3), torch.zeros(2, 4)).memory < available_bytes(torch.device("cpu")) * 1.1


# ----------------------------------------------------------------------------------------------------------- the costs


def workload(*layers: tuple[int, int], rest: int = 0, **given: object) -> Workload:
    terms = tuple(
        LayerSize(str(i), d, p, 1, plain=True, returns_logits=i == len(layers) - 1) for i, (p, d) in enumerate(layers)
    )
    modules = (*((term.module, term.size) for term in terms), *([("norm", rest)] if rest else []))
    sizes = tuple(size for _, size in modules)
    basis = Workload(modules, sizes, terms, layers[-1][1], 64, "ggn", 4, 4, 1000, "cpu", 20, 1000)
    return dataclasses.replace(basis, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_more_of_anything_never_costs_less(structure: str) -> None:
    small = workload((31, 20), (21, 5))
    larger = [
        workload((61, 20), (21, 5)),
        workload((31, 20), (21, 20), (21, 5)),
        dataclasses.replace(small, itemsize=8),
        dataclasses.replace(small, batch=256),
        dataclasses.replace(small, draws=100_000),
    ]
    least = structure_called(structure).cost(small)
    assert 0 < least.posterior_bytes <= min(least.fit_bytes, least.predict_bytes)
    for work in larger:
        more = structure_called(structure).cost(work)
        assert more.posterior_bytes >= least.posterior_bytes
        assert more.fit_bytes >= least.fit_bytes
        assert more.predict_bytes >= least.predict_bytes
        assert more.input_products >= least.input_products


def test_backward_passes_lead_through_what_follows_the_first_selected_layer() -> None:
    network = Network(perceptron(6, 5, 4, 3))
    layout = inspect(network, Batch((torch.zeros(8, 6),))).layout
    # Three linear layers with a nonlinearity between them, of 1, 2, 3, … seconds.
    assert len(layout.events) == 5
    ends = (1.0, 3.0, 6.0, 10.0, 15.0)
    events = tuple(dataclasses.replace(e, seconds=end) for e, end in zip(layout.events, ends, strict=True))
    layout = dataclasses.replace(layout, events=events, seconds=15.0)
    assert layout.tail_share(layout.everything()) == pytest.approx(14 / 15)
    assert layout.tail_share(layout.last(2)) == pytest.approx(9 / 15)
    assert layout.tail_share(layout.last(1)) == 0


def test_a_norm_among_the_layers_takes_jacobians() -> None:
    assert workload((31, 20), (21, 5)).is_factored
    assert not workload((31, 20), (21, 5), rest=40).is_factored


@pytest.mark.parametrize(
    "model",
    [perceptron(20, 15, 10), nn.Sequential(nn.Linear(20, 15), nn.LayerNorm(15), nn.Linear(15, 10))],
    ids=["factored", "jacobians"],
)
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_the_plan_sees_the_route_that_the_fit_takes(model: nn.Module, fisher: str) -> None:
    x = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    for layers in (1, 2):
        task = errbar.collect(model, [x], last_layers=layers, fisher=fisher).task
        assert task.layout is not None
        assert task.route is not None
        sizes = {"batch": task.batch_size, "fisher": task.fisher, "dtype": task.dtype, "rank": 1}
        work = task.layout.workload(task.selection, **sizes)
        assert work.is_factored == task.route.factored
        assert work.is_per_class == comes_apart_by_class(task.fisher, returns_logits=task.route.identity)
        assert work.n == task.selection.n_parameters


def test_a_cholesky_factor_in_place_is_the_same_and_says_when_there_is_none() -> None:
    generator = torch.Generator().manual_seed(0)
    half = torch.randn(3, 7, 9, generator=generator, dtype=torch.float64)
    matrices = linalg.symmetric(half @ half.mT)
    expected, jitter = linalg.safe_cholesky(matrices, name="It", limit=0.0)
    assert jitter == 0
    given = matrices.clone().mT
    made = linalg.cholesky_in_place(given)
    assert made is not None
    assert made.data_ptr() == given.data_ptr()
    assert torch.equal(made, expected)
    matrices[1, 0, 0] = -1
    assert linalg.cholesky_in_place(matrices.clone().mT) is None


# -------------------------------------------------------------------------------- against what is true


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
@pytest.mark.parametrize(
    "case",
    [
        "dense 100-40-10",
        "per-class 128-1000 eta",
        pytest.param("kron 2048-1000", marks=pytest.mark.slow),
        pytest.param("diag resnet20", marks=pytest.mark.slow),
    ],
)
def test_the_predicted_peak_is_within_a_quarter_of_the_measured_one(case: str) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "bench" / "memory.py"), "--case", case, "--device", "cpu"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    for key in ("fit bytes", "predict bytes"):
        assert found["measured"][key] > 1e8
        assert 0.75 <= found["ratio"][key] <= 1.25, found
