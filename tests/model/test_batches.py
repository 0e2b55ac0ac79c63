"""What a batch may be, and what a model may return: `unpack`, inputs in containers, loaders, `output`."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    TensorDataset,
)

import errbar
from errbar._model.batch import Batch, joined, pieces, to_batch

DOUBLE = torch.float64


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def labels(size: int = 12, classes: int = 3) -> Tensor:
    return torch.arange(size) % classes


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(6, 5, dtype=DOUBLE)
        self.head = nn.Linear(5, 3, dtype=DOUBLE)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        hidden: Tensor = self.head(torch.tanh(self.body(torch.cat([a, b], 1))))
        return hidden


class Inside(TwoInputs):
    """The same network, with both inputs in one argument."""

    def __init__(self, take: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.take = take

    def forward(self, inputs: Any) -> Tensor:  # type: ignore[override]
        return super().forward(*self.take(inputs))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def of_pair(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (batch[0], batch[1]), {}, batch[2] if len(batch) > 2 else None


def as_it_is(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    return (batch,), {}, None


def fitted(**options: Any) -> tuple[errbar.Posterior, Tensor, Tensor]:
    a, b = randn(12, 4), randn(12, 2, seed=1)
    posterior = errbar.fit(TwoInputs(), [(a, b, labels())], last_layers=2, unpack=of_pair, **options)
    return posterior, a, b


def reference(posterior: errbar.Posterior, a: Tensor, b: Tensor) -> errbar.LogitGaussian:
    """Without any `unpack`: by the names of the arguments."""
    return posterior.logits({"a": a, "b": b})


# ----------------------------------------------------------------------------------------------------- unpack is kept


def test_a_posterior_applies_the_unpack_of_its_fit() -> None:
    posterior, a, b = fitted()
    expected = reference(posterior, a, b)
    for batch in ((a, b), [a, b], (a, b, labels())):
        assert torch.equal(posterior.logits(batch).covariance, expected.covariance)
        assert torch.equal(posterior.predict(batch, 50).pmf, posterior.predict({"a": a, "b": b}, 50).pmf)
        assert torch.equal(posterior.joint_logits(batch).mean, expected.mean)
        by = posterior.predict_by_parameters(batch, 5).pmf
        assert torch.equal(by, posterior.predict_by_parameters({"a": a, "b": b}, 5).pmf)


def test_functions_of_data_apply_the_unpack_of_the_fit() -> None:
    posterior, a, b = fitted()
    data = [(a, b, labels())]
    assert posterior.update(data).information.n_samples == 24
    assert posterior.update(data).forget(data).information.n_samples == 12
    options: dict[str, Any] = {"fit": "temperature", "samples": 20}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)
        calibrated = errbar.calibrate(posterior, data, **options)
        assert calibrated.temperature == errbar.calibrate(posterior, data, unpack=of_pair, **options).temperature
        prior = errbar.choose_prior(posterior.information, data, by="nll", precisions=[1.0, 3.0], samples=20)
    assert prior.precision in (1.0, 3.0)
    scores = errbar.outlier_scores(posterior, data, samples=20)
    assert scores.label_suspicion is not None
    assert errbar.report.assess(posterior, data, samples=20).linearisation.inputs == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda posterior: posterior.with_prior(errbar.Prior(2.0)),
        lambda posterior: posterior.with_calibration(temperature=1.5),
        lambda posterior: posterior.update([(randn(4, 4), randn(4, 2))]),
        lambda posterior: posterior.to("cpu"),
        copy.copy,
        copy.deepcopy,
        lambda posterior: pickle.loads(pickle.dumps(posterior)),
        lambda posterior: errbar.condition(posterior.information + posterior.information, posterior.prior),
        lambda posterior: errbar.condition(posterior.information * 0.5, posterior.prior),
    ],
)
def test_what_is_made_of_a_posterior_keeps_unpack_and_output(
    change: Callable[[errbar.Posterior], errbar.Posterior],
) -> None:
    a, b = randn(12, 4), randn(12, 2, seed=1)
    posterior = errbar.fit(Returning("tuple"), [(a, b)], last_layers=1, unpack=of_pair, output=1)
    made = change(posterior)
    assert made.predict((a, b), 20).pmf.shape == (12, 3)
    expected = reference(posterior, a, b).mean / made.temperature
    torch.testing.assert_close(made.logits((a, b)).mean, expected, rtol=1e-12, atol=0)


def test_copies_share_a_function_that_cannot_be_pickled() -> None:
    a, b = randn(12, 4), randn(12, 2, seed=1)
    posterior = errbar.fit(TwoInputs(), [(a, b)], last_layers=1, unpack=lambda batch: (batch, {}, None))
    assert torch.equal(copy.deepcopy(posterior).logits((a, b)).mean, posterior.logits((a, b)).mean)
    with pytest.raises(
        errbar.ArgumentError, match=r"unpack is <function .*cannot be pickled.*errbar\.load\(path, model, u"
    ):
        pickle.dumps(posterior)
    picking = errbar.fit(TwoInputs(), [{"a": a, "b": b}], last_layers=1, output=lambda returned: returned)
    with pytest.raises(errbar.ArgumentError, match=r"output is <function .*cannot be pickled"):
        pickle.dumps(picking.information)


def test_a_tensor_is_the_input_of_the_model_unless_the_fit_had_tensors() -> None:
    """With batches (image, label) of an odd form, `predict(image)` needs no disguise."""
    model, x = nn.Sequential(nn.Linear(4, 3, dtype=DOUBLE)), randn(12, 4)
    odd = errbar.fit(model, [(labels(), x)], last_layers=1, unpack=lambda batch: ((batch[1],), {}, batch[0]))
    plain = errbar.fit(model, [(x, labels())], last_layers=1)
    expected = plain.logits(x).mean
    assert torch.equal(odd.logits(x).mean, expected)
    assert torch.equal(odd.logits({"input": x}).mean, expected)
    assert torch.equal(odd.logits((labels(), x)).mean, expected)
    halves = errbar.fit(model, [2 * x], last_layers=1, unpack=lambda batch: ((batch / 2,), {}, None))
    assert torch.equal(halves.logits(2 * x).mean, expected)
    # Where it is given, it is applied.
    assert torch.equal(odd.logits(2 * x, unpack=lambda batch: ((batch / 2,), {}, None)).mean, expected)


def test_labels_may_be_left_out_of_what_is_predicted() -> None:
    """A stand-in takes their place, and has to come out as labels and nowhere else."""
    a, b, y = randn(12, 4), randn(12, 2, seed=1), labels()
    model = TwoInputs()
    expected = errbar.fit(model, [{"a": a, "b": b}], last_layers=1).logits({"a": a, "b": b}).mean
    plain = errbar.fit(model, [(a, b, y)], last_layers=1, unpack=lambda batch: ((batch[0], batch[1]), {}, batch[2]))

    def by_name(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        left, right, target = batch
        return (), {"a": left, "b": right}, target

    named = errbar.fit(model, [(a, b, y)], last_layers=1, unpack=by_name)
    nested = errbar.fit(model, [({"a": a, "b": b}, y)], last_layers=1, unpack=lambda batch: ((), batch[0], batch[1]))
    halved = errbar.fit(
        model, [((2 * a, b), y)], last_layers=1, unpack=lambda batch: ((batch[0][0] / 2, b), {}, batch[1])
    )
    for posterior, batch in (
        (plain, (a, b)),
        (plain, [a, b]),
        (named, (a, b)),
        (nested, {"a": a, "b": b}),
        (nested, ({"a": a, "b": b},)),
        (halved, ((2 * a, b),)),
    ):
        assert torch.equal(posterior.logits(batch).mean, expected)
    # What is missing here is an input.
    for batch in ((a,), a):
        with pytest.raises(errbar.DataError, match=r"unpack\(batch\) failed|The model failed on a batch"):
            plain.logits(batch)


# ------------------------------------------------------------------------------------------ inputs inside of containers


def taking_dict(inputs: Any) -> tuple[Tensor, Tensor]:
    return inputs["deep"]["first"], inputs["second"]


CONTAINERS: dict[str, tuple[Callable[[Any], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Any]]] = {
    "dict": (taking_dict, lambda a, b: {"deep": {"first": a}, "second": b, "scale": 1.0}),
    "ordered dict": (taking_dict, lambda a, b: OrderedDict(deep={"first": a}, second=b)),
    "list": (lambda inputs: (inputs[0], inputs[1]), lambda a, b: [a, b]),
    "tuple": (lambda inputs: inputs, lambda a, b: (a, b)),
    "named tuple": (lambda inputs: (inputs.first, inputs.second), lambda a, b: Pair(a, b)),
}


@pytest.mark.parametrize("structure", ["dense", "kron", "diag", "lowrank"])
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_model_that_takes_one_container_is_the_model_that_takes_its_parts(kind: str, structure: str) -> None:
    take, put = CONTAINERS[kind]
    a, b = randn(12, 4), randn(12, 2, seed=1)
    inside, apart = Inside(take), TwoInputs()
    data = [(put(a[:7], b[:7]), labels(7)), (put(a[7:], b[7:]), labels(5))]
    options: dict[str, Any] = {"last_layers": 2, "structure": structure}
    found = errbar.fit(inside, data, unpack=lambda batch: ((batch[0],), {}, batch[1]), **options)
    expected = errbar.fit(apart, [{"a": a[:7], "b": b[:7]}, {"a": a[7:], "b": b[7:]}], **options)
    assert found.information.n_samples == 12
    assert found.information.log_likelihood is not None
    torch.testing.assert_close(found.covariance(), expected.covariance(), rtol=1e-12, atol=0)
    prediction = found.predict((put(a, b), None), 50)
    torch.testing.assert_close(prediction.pmf, expected.predict({"a": a, "b": b}, 50).pmf, rtol=1e-12, atol=0)


def test_generic_jacobians_go_through_containers() -> None:
    """Parameters that no layer holds are differentiated sample by sample."""

    class Scaled(Inside):
        def __init__(self) -> None:
            super().__init__(taking_dict)
            self.scale = nn.Parameter(torch.ones(3, dtype=DOUBLE))

        def forward(self, inputs: Any) -> Tensor:
            return super().forward(inputs) * self.scale

    a, b = randn(6, 4), randn(6, 2, seed=1)
    batch = {"deep": {"first": a}, "second": b}
    model = Scaled()
    posterior = errbar.fit(model, [batch], parameters="all", unpack=as_it_is)
    names = posterior.information.parameter_names
    values = {name: p.detach() for name, p in model.named_parameters()}

    def logits(values: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(model, values, (batch,))
        return found

    parts = torch.func.jacrev(logits)(values)
    jacobian = torch.cat([parts[name].flatten(2) for name in names], 2)
    f = torch.softmax(model(batch).detach(), 1)
    fisher = torch.diag_embed(f) - f[:, :, None] * f[:, None, :]
    expected = torch.einsum("bmi,bmk,bkj->ij", jacobian, fisher, jacobian)
    torch.testing.assert_close(posterior.information.dense(), expected, rtol=1e-9, atol=1e-12)


def test_rows_and_maps_go_into_containers() -> None:
    a, b = randn(5, 4), randn(5, 2)
    batch = Batch(({"a": [a, Pair(b, b)], "static": torch.zeros(3), "name": "x"},), {"pair": (b, 3)}, labels(5))
    assert len(batch) == 5
    part = batch.rows(1, 3)
    assert len(part) == 2
    assert torch.equal(part.args[0]["a"][0], a[1:3])
    assert isinstance(part.args[0]["a"][1], Pair)
    assert torch.equal(part.args[0]["a"][1].second, b[1:3])
    assert part.args[0]["static"].shape == (3,)
    assert (part.args[0]["name"], part.kwargs["pair"][1]) == ("x", 3)
    assert torch.equal(torch.as_tensor(part.labels), labels(5)[1:3])
    assert torch.equal(batch.map(lambda t: 2 * t).kwargs["pair"][0], 2 * b)
    again = joined([batch.rows(i, i + 1) for i in range(5)])
    assert torch.equal(again.args[0]["a"][0], a)
    assert len(again) == 5


def test_a_tensor_inside_a_container_is_checked() -> None:
    take, put = CONTAINERS["dict"]
    a, b = randn(6, 4), randn(6, 2)
    b[2, 1] = torch.nan
    with pytest.raises(errbar.DataError, match=r"An input holds NaN or infinite values"):
        errbar.fit(Inside(take), [put(a, b)], last_layers=1, unpack=as_it_is)
    with pytest.raises(
        errbar.DataError, match=r"failed on a batch with \(6, 4\) torch.float64, \(6, 3\) torch.float64"
    ):
        errbar.fit(Inside(take), [put(a, randn(6, 3))], last_layers=1, unpack=as_it_is)


# ------------------------------------------------------------------------------------------------- packed sequences


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.cell = nn.GRU(3, 4, batch_first=True, dtype=DOUBLE)
        self.head = nn.Linear(4, 3, dtype=DOUBLE)

    def forward(self, sequences: PackedSequence) -> Tensor:
        logits: Tensor = self.head(self.cell(sequences)[1][0])
        return logits


def sequences(count: int = 9) -> list[Tensor]:
    return [randn(1 + (7 * i) % 5, 3, seed=i) for i in range(count)]


def packed(rows: list[Tensor]) -> PackedSequence:
    return pack_sequence(rows, enforce_sorted=False)


@pytest.mark.parametrize("options", [{"last_layers": 1}, {"parameters": ["head", "cell.bias_hh_l0"]}])
@pytest.mark.parametrize("structure", ["dense", "lowrank"])
def test_packed_sequences_are_inputs(options: dict[str, Any], structure: str) -> None:
    """One batch of all sequences is each of them by itself, whatever their lengths."""
    rows, model = sequences(), Recurrent()
    alone = errbar.collect(model, [packed([row]) for row in rows], structure=structure, **options)
    posterior = errbar.fit(model, [(packed(rows), labels(9))], structure=structure, **options)
    torch.testing.assert_close(posterior.information.dense(), alone.dense(), rtol=1e-9, atol=1e-12)
    assert posterior.information.n_samples == 9
    unpacked = errbar.fit(
        model,
        [{"rows": rows, "y": labels(9)}],
        structure=structure,
        unpack=lambda batch: ((packed(batch["rows"]),), {}, batch["y"]),
        **options,
    )
    expected = torch.cat([posterior.logits(packed([row])).mean for row in rows])
    for found in (
        posterior.logits(packed(rows)),
        unpacked.logits({"rows": rows, "y": None}),
        unpacked.logits(packed(rows)),
    ):
        torch.testing.assert_close(found.mean, expected, rtol=1e-12, atol=1e-12)
        assert bool((found.variance > 0).all())


@pytest.mark.parametrize("in_order", [True, False])
def test_rows_of_a_packed_sequence_are_its_sequences(in_order: bool) -> None:
    rows = sorted(sequences(), key=len, reverse=True) if in_order else sequences()
    batch = to_batch((pack_sequence(rows, enforce_sorted=in_order), labels(9)))
    assert len(batch) == 9
    part = batch.rows(2, 6)
    assert len(part) == 4
    padded, lengths = pad_packed_sequence(part.args[0], batch_first=True)
    assert lengths.tolist() == [len(row) for row in rows[2:6]]
    for found, length, row in zip(padded, lengths, rows[2:6], strict=True):
        assert torch.equal(found[:length], row)
    assert torch.equal(torch.as_tensor(part.labels), labels(9)[2:6])
    doubled = batch.map(lambda tensor: tensor.to(torch.float32) if tensor.is_floating_point() else tensor)
    assert doubled.args[0].data.dtype == torch.float32
    again = joined([batch.rows(i, i + 1) for i in range(9)])
    assert torch.equal(pad_packed_sequence(again.args[0])[0], pad_packed_sequence(batch.args[0])[0])


# ----------------------------------------------------------------------------------------------- loaders in `predict`


class Rows(Dataset[Tensor]):
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


@pytest.mark.parametrize("structure", ["dense", "kron", "lowrank"])
def test_predict_and_logits_put_the_batches_of_a_loader_one_after_the_other(structure: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double(), randn(11, 4)
    posterior = errbar.fit(model, [x], last_layers=2, structure=structure)

    def generator() -> Iterator[Tensor]:
        yield from x.split(4)

    whole = posterior.predict(x, 100)
    for data in (
        DataLoader(TensorDataset(x, labels(11)), batch_size=4),
        DataLoader(Rows(x), batch_size=4),
        TensorDataset(x),
        Rows(x),
        generator(),
    ):
        prediction = posterior.predict(data, 100)
        torch.testing.assert_close(prediction.pmf, whole.pmf, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(prediction.covariance, whole.covariance, rtol=1e-9, atol=1e-12)
    gaussian = posterior.logits(DataLoader(Rows(x), batch_size=4))
    torch.testing.assert_close(gaussian.covariance, posterior.logits(x).covariance, rtol=1e-9, atol=1e-12)


def test_a_loader_given_to_predict_goes_through_unpack() -> None:
    posterior, a, b = fitted()
    expected = reference(posterior, a, b).mean
    loader = DataLoader(TensorDataset(a, b, labels()), batch_size=5)
    torch.testing.assert_close(posterior.logits(loader).mean, expected, rtol=1e-12, atol=0)
    swapped = DataLoader(TensorDataset(b, a), batch_size=5)
    found = posterior.predict(swapped, 20, unpack=lambda batch: ((batch[1], batch[0]), {}, None)).pmf
    torch.testing.assert_close(found, posterior.predict((a, b), 20).pmf, rtol=1e-9, atol=0)


def test_a_list_or_tuple_is_one_batch() -> None:
    model, x = nn.Linear(4, 3, dtype=DOUBLE), randn(12, 4)
    posterior = errbar.fit(model, [x], last_layers=1)
    expected = posterior.logits(x).mean
    for batch in ([x], (x,), (x, labels()), [x, labels().double()[:, None]], (x, labels(), x)):
        assert torch.equal(posterior.logits(batch).mean, expected)


# ----------------------------------------------------------------------------------- `output`: where the logits are


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.features = logits.detach()
        self.main = logits


class Returning(TwoInputs):
    """The network that returns its logits among other things."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, a: Tensor, b: Tensor) -> Any:  # type: ignore[override]
        logits = super().forward(a, b)
        other = a.detach()
        return {
            "tuple": (other, logits),
            "list": [other, logits],
            "dict": {"features": other, "main": logits},
            "object": Answer(logits),
            "deep": {"heads": [logits, other]},
        }[self.kind]


def deep(returned: Any) -> Tensor:
    logits: Tensor = returned["heads"][0]
    return logits


OUTPUTS = [("tuple", 1), ("tuple", -1), ("list", 1), ("dict", "main"), ("dict", 1), ("object", "main"), ("deep", deep)]


@pytest.mark.parametrize(("kind", "output"), OUTPUTS)
def test_output_picks_the_logits(kind: str, output: Any) -> None:
    a, b = randn(12, 4), randn(12, 2, seed=1)
    batch = {"a": a, "b": b, "labels": labels()}
    model = Returning(kind)
    expected = errbar.fit(TwoInputs(), [batch], last_layers=2)
    posterior = errbar.fit(model, [batch], last_layers=2, output=output)
    assert torch.equal(posterior.covariance(), expected.covariance())
    assert torch.equal(posterior.predict(batch, 50).pmf, expected.predict(batch, 50).pmf)
    by, reference = (p.predict_by_parameters(batch, 5).pmf for p in (posterior, expected))
    assert torch.equal(by, reference)
    assert errbar.plan(model, batch, output=output).options[0].n_parameters == 18
    low = errbar.fit(model, [batch], parameters="all", structure="lowrank", output=output)
    assert low.information.n_parameters == 53


@pytest.mark.parametrize(
    ("kind", "output", "message"),
    [
        ("tuple", None, r"The model returned tuple of 2; expected logits .*with output=: a position, a key, or a func"),
        ("dict", None, r"The model returned dict with the keys 'features', 'main'; expected logits"),
        ("tuple", 2, r"returned tuple of 2, and output=2 is not in it; expected the position or the key"),
        ("tuple", "main", r"returned tuple of 2, and output='main' is not in it"),
        ("dict", "logits", r"returned dict with the keys 'features', 'main', and output='logits' is not in it"),
        ("object", "logits", r"returned Answer, and output='logits' is not in it"),
        ("object", 0, r"returned Answer, and output=0 is not in it"),
        ("tuple", deep, r"function output= failed on what the model returned, tuple \(TypeError"),
        ("tuple", lambda returned: None, r"returned NoneType; expected logits"),
    ],
)
def test_an_output_that_is_not_there(kind: str, output: Any, message: str) -> None:
    batch = {"a": randn(12, 4), "b": randn(12, 2)}
    for call in (errbar.fit, errbar.collect):
        with pytest.raises(errbar.ModelError, match=message):
            call(Returning(kind), [batch], last_layers=1, output=output)
    with pytest.raises(errbar.ModelError, match=message):
        errbar.plan(Returning(kind), batch, output=output)


def test_an_output_of_a_model_that_returns_one_tensor() -> None:
    batch = {"a": randn(12, 4), "b": randn(12, 2)}
    for output in (0, "main"):
        with pytest.raises(
            errbar.ModelError, match=r"The model returned (a tensor of shape \(12, 3\)|Tensor), and output="
        ):
            errbar.fit(TwoInputs(), [batch], last_layers=1, output=output)
    with pytest.raises(
        errbar.ArgumentError, match=r"output is 1\.5; expected where in the model's output the logits are"
    ):
        errbar.fit(TwoInputs(), [batch], last_layers=1, output=1.5)  # type: ignore[arg-type]


def test_information_of_different_outputs_does_not_add_up(tmp_path: Path) -> None:
    batch = {"a": randn(12, 4), "b": randn(12, 2)}
    first, second = (errbar.collect(Returning("dict"), [batch], last_layers=1, output=o) for o in ("main", 1))
    with pytest.raises(errbar.MismatchError, match=r"different outputs of the model .*: key 'main' and position 1"):
        first + second
    paths = [tmp_path / "first.safetensors", tmp_path / "second.safetensors"]
    first.save(paths[0])
    (second * 0.5).save(paths[1])
    with pytest.raises(errbar.MismatchError, match=r"different outputs of the model"):
        errbar.merge(paths)
    checkpoint = tmp_path / "fit.safetensors"
    errbar.collect(Returning("dict"), [batch], last_layers=1, output="main", checkpoint=checkpoint)
    with pytest.raises(errbar.MismatchError, match=r"from a fit with other output"):
        errbar.collect(Returning("dict"), [batch], last_layers=1, output=1, checkpoint=checkpoint)


def test_an_export_has_as_many_inputs_as_the_call_and_the_logits_that_were_picked(tmp_path: Path) -> None:
    a, b = randn(12, 4), randn(12, 2, seed=1)
    posterior = errbar.fit(Returning("dict"), [(a, b)], last_layers=2, unpack=of_pair, output="main")
    path = tmp_path / "posterior.pt2"
    posterior.export(path, example=(a, b), samples=50)
    found = torch.export.load(path).module()(a[:5], b[:5])
    torch.testing.assert_close(found["pmf"], posterior.predict((a[:5], b[:5]), 50).pmf, rtol=1e-8, atol=1e-10)
    inside = errbar.fit(Inside(taking_dict), [{"deep": {"first": a}, "second": b}], last_layers=1, unpack=as_it_is)
    with pytest.raises(errbar.ExportError, match=r"The example holds a dict; expected tensors only"):
        inside.export(path, example={"deep": {"first": a}, "second": b})


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(("kind", "output"), [("tuple", 1), ("tuple", -1), ("dict", "main")])
def test_files_hold_a_position_or_a_key(kind: str, output: Any, tmp_path: Path) -> None:
    posterior, batch = _saved(kind, output, tmp_path)
    path = tmp_path / "posterior.safetensors"
    loaded = errbar.load(path, Returning(kind))
    assert torch.equal(loaded.logits(batch).mean, posterior.logits(batch).mean)
    assert torch.equal(
        errbar.load(path, Returning(kind), output=output).predict(batch).pmf, posterior.predict(batch).pmf
    )
    with pytest.raises(errbar.MismatchError, match=r"output is position 7, and the file says .*Leave output= out"):
        errbar.load(path, Returning(kind), output=7)
    described = errbar.info(path)
    assert described.output == (f"key {output!r}" if isinstance(output, str) else f"position {output}")
    assert not described.unpack
    assert errbar.verify(path, Returning(kind)).output == described.output


def _saved(kind: str, output: Any, folder: Path) -> tuple[errbar.Posterior, dict[str, Tensor]]:
    batch = {"a": randn(12, 4), "b": randn(12, 2)}
    posterior = errbar.fit(Returning(kind), [batch], last_layers=1, output=output)
    posterior.save(folder / "posterior.safetensors", factors=True)
    posterior.information.save(folder / "information.safetensors")
    return posterior, batch


def test_files_ask_for_functions(tmp_path: Path) -> None:
    posterior, batch = _saved("deep", deep, tmp_path)
    path, model = tmp_path / "posterior.safetensors", Returning("deep")
    with pytest.raises(
        errbar.ArgumentError, match=r"output=, a function .*errbar\.load\(path, model, output=function\)"
    ):
        errbar.load(path, model)
    assert torch.equal(errbar.load(path, model, output=deep).predict(batch).pmf, posterior.predict(batch).pmf)
    assert errbar.info(path).output == "a function"
    assert errbar.verify(path, model).output == "a function"
    merged = errbar.merge([tmp_path / "information.safetensors"])
    with pytest.raises(errbar.ArgumentError, match=r"information\.with_model\(model, output=function\)"):
        errbar.condition(merged, errbar.Prior(1.0), model=model)
    bound = merged.with_model(model, output=deep)
    assert torch.equal((bound + posterior.information).dense(), 2 * posterior.information.dense())
    assert torch.equal(errbar.condition(bound, posterior.prior).logits(batch).mean, posterior.logits(batch).mean)


def test_a_key_that_a_file_cannot_hold(tmp_path: Path) -> None:
    class Odd(TwoInputs):
        def forward(self, a: Tensor, b: Tensor) -> Any:  # type: ignore[override]
            return {"a\nb": super().forward(a, b)}

    batch = {"a": randn(12, 4), "b": randn(12, 2)}
    posterior = errbar.fit(Odd(), [batch], last_layers=1, output="a\nb")
    with pytest.raises(errbar.ArgumentError, match=r"output is 'a\\nb', with characters that cannot be printed"):
        posterior.save(tmp_path / "posterior.safetensors")


def test_a_loaded_posterior_takes_unpack_again(tmp_path: Path) -> None:
    posterior, a, b = fitted()
    path = tmp_path / "posterior.safetensors"
    posterior.save(path)
    assert errbar.info(path).unpack
    expected = reference(posterior, a, b).mean
    loaded = errbar.load(path, TwoInputs(), unpack=of_pair)
    for batch in ((a, b), {"a": a, "b": b}):
        assert torch.equal(loaded.logits(batch).mean, expected)
    without = errbar.load(path, TwoInputs())
    assert torch.equal(without.logits({"a": a, "b": b}).mean, expected)
    with pytest.raises(errbar.DataError, match=r"The model failed on a batch with .* pass unpack="):
        without.logits((a, b))
    without.save(path)
    assert errbar.info(path).unpack


# --------------------------------------------------------------------------------------- what is ignored, and said so


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")
@pytest.mark.parametrize("weights", [torch.rand(12), torch.rand(12).numpy(), torch.rand(12).half()])
def test_weights_that_are_ignored_are_told_of_once(weights: Any) -> None:
    model, x = nn.Linear(4, 3, dtype=DOUBLE), randn(12, 4)
    data = [(x, labels(), weights)] * 3
    with pytest.warns(
        errbar.DataWarning, match=r"Element 3 of a batch, 12 numbers, looks like a weight .*unpack="
    ) as told:
        posterior = errbar.fit(model, data, last_layers=1)
    assert len(told) == 1
    for call in (
        lambda: posterior.update(data),
        lambda: errbar.calibrate(posterior, data, fit="temperature", samples=10),
        lambda: errbar.outlier_scores(posterior, data, samples=10),
    ):
        with pytest.warns(errbar.DataWarning, match=r"is ignored: all samples count alike") as told:
            call()
        assert sum(warning.category is errbar.DataWarning for warning in told) == 1


def test_nothing_is_said_of_what_does_not_look_like_weights_or_is_meant() -> None:
    """Warnings are errors here."""
    model, x = nn.Linear(4, 3, dtype=DOUBLE), randn(12, 4)
    for other in (torch.arange(12), torch.rand(12, 2), torch.rand(5), "names", None):
        errbar.fit(model, [(x, labels(), other)], last_layers=1)
    data = [(x, labels(), torch.rand(12))]
    posterior = errbar.fit(model, data, last_layers=1, unpack=lambda batch: ((batch[0],), {}, batch[1]))
    posterior.update(data)
    posterior.predict(data[0], 10)
    errbar.fit(model, [(x, labels())], last_layers=1).predict(data[0], 10)


def test_a_batch_comes_in_pieces_where_all_of_it_can_be_cut() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    cut = list(pieces(to_batch((x, y)), 4))
    assert [len(part) for part in cut] == [4, 4, 2]
    assert torch.equal(torch.cat([part.labels for part in cut]), y)
    assert torch.equal(torch.cat([part.args[0] for part in cut]), x)
    # Labels that are no tensor yet stay with their inputs.
    assert [len(part) for part in pieces(to_batch((x, y.tolist())), 4)] == [10]
    assert [len(part) for part in pieces(to_batch((x, y)), None)] == [10]
