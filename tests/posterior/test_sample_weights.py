"""Weights of samples and of classes: Σ w_n JᵀΛJ, for every structure and Fisher information."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

import errbar
from data import draw, generator
from networks import mlp, seeded

SIZE, CLASSES = 24, 4
X = draw(SIZE, 16)
Y = torch.randint(0, CLASSES, (SIZE,), generator=generator(2))
W = torch.rand(SIZE, generator=generator(3), dtype=torch.float64) * 3

FITS: dict[str, dict[str, Any]] = {
    "dense": {"last_layers": 2},
    "dense, all": {"parameters": "all"},
    "per class": {"last_layers": 1, "fisher": "eta"},
    "block": {"parameters": "all", "structure": "block"},
    "kron": {"parameters": "all", "structure": "kron"},
    "kron, eta": {"parameters": "all", "structure": "kron", "fisher": "eta"},
    "kron of a last layer": {"last_layers": 1, "structure": "kron"},
    "diag": {"parameters": "all", "structure": "diag"},
    "mixed": {"parameters": "all", "structure": {"8": "dense", "*": "kron"}},
    "sampled": {"parameters": "all", "fisher": "sampled", "draws": 2},
    "kron, sampled": {"parameters": "all", "structure": "kron", "fisher": "sampled"},
}


def network() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.Tanh(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(12, 6),
            nn.Softplus(),
            nn.Linear(6, CLASSES),
        )
    )


def unpack(batch: Any) -> Any:
    x, y, w = batch
    return (x,), {}, y, w


def weighted(x: Tensor = X, y: Tensor = Y, w: Tensor = W, size: int = 7) -> list[tuple[Tensor, ...]]:
    return list(zip(x.split(size), y.split(size), w.split(size), strict=True))


def collected(options: dict[str, Any], w: Tensor = W, **more: Any) -> errbar.Information:
    return errbar.collect(network(), weighted(w=w), unpack=unpack, **options, **more)


def near(first: Tensor, second: Tensor, tolerance: float = 1e-8) -> bool:
    return bool((first - second).abs().max() <= tolerance * second.abs().max())


@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("ignore::errbar.DataWarning")  # equal samples have equal draws, as they should here
def test_a_weight_of_two_is_the_data_twice(name: str) -> None:
    options = FITS[name]
    twice = errbar.collect(network(), [(X, Y), (X, Y)], **options)
    information = collected(options, torch.full((SIZE,), 2.0))
    assert near(information.dense(), twice.dense())
    assert information.n_samples == twice.n_samples == 2 * SIZE
    assert information.log_likelihood == pytest.approx(twice.log_likelihood, rel=1e-12)
    first, second = (errbar.condition(one, errbar.Prior(1.0)) for one in (information, twice))
    assert near(first.logits(X).covariance, second.logits(X).covariance)
    assert first.log_evidence() == pytest.approx(second.log_evidence(), rel=1e-9)


@pytest.mark.parametrize("name", FITS)
def test_weights_of_one_and_zero_are_as_if_there_were_none_and_no_such_samples(name: str) -> None:
    keep = (torch.arange(SIZE) % 3 > 0).double()
    rest = errbar.collect(network(), [(X[keep > 0], Y[keep > 0])], **FITS[name])
    information = collected(FITS[name], keep)
    assert near(information.dense(), rest.dense())
    assert information.n_samples == rest.n_samples


def test_the_oracle_by_automatic_differentiation() -> None:
    model = network()
    values = {name: value.detach() for name, value in model.named_parameters()}

    def logits(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, parameters, (one[None],))[0]  # type: ignore[no-any-return]

    parts = vmap(jacrev(logits), (None, 0))(values, X)
    jacobian = torch.cat([parts[name].flatten(2) for name in values], 2)
    f = torch.softmax(model(X).detach(), 1)
    Lambda = torch.diag_embed(f) - f[:, :, None] * f[:, None, :]
    expected = torch.einsum("n,nai,nab,nbj->ij", W, jacobian, Lambda, jacobian)
    assert near(collected({"parameters": "all"}).dense(), expected)
    diagonal = collected({"parameters": "all", "structure": "diag"}).dense().diagonal()
    assert near(diagonal, expected.diagonal())
    by_class = [0.5, 0.0, 2.0, 1.0]
    factors = torch.tensor(by_class, dtype=torch.float64)[Y]
    expected = torch.einsum("n,nai,nab,nbj->ij", W * factors, jacobian, Lambda, jacobian)
    both = collected({"parameters": "all"}, class_weights=by_class)
    assert near(both.dense(), expected)
    assert both.n_samples == pytest.approx(float((W * factors).sum()))


def test_weights_of_a_sketch() -> None:
    """A sketch that keeps every direction is exact."""
    options = {"last_layers": 1, "structure": "lowrank", "rank": 28}
    sketch, exact = collected(options), collected({"last_layers": 1})
    assert near(sketch.dense(), exact.dense())
    assert sketch.n_samples == pytest.approx(float(W.sum()))


def test_update_forget_and_sums() -> None:
    posterior = errbar.fit(network(), weighted(), unpack=unpack, last_layers=2)
    more = weighted(draw(5, 16, seed=8), Y[:5], W[:5])
    updated = posterior.update(more)
    assert updated.information.n_samples == pytest.approx(float(W.sum() + W[:5].sum()))
    assert near(updated.forget(more).information.dense(), posterior.information.dense())
    every = errbar.collect(network(), [*weighted(), *more], unpack=unpack, last_layers=2)
    assert near(updated.information.dense(), every.dense())
    assert near(updated.logits(X).covariance, errbar.condition(every, errbar.Prior()).logits(X).covariance)
    with pytest.raises(errbar.ForgetError, match="Cannot forget"):
        posterior.forget([(X, Y, 10 * W)])


def test_class_weights_are_those_of_the_samples_and_go_into_files(tmp_path: Path) -> None:
    by_class = torch.tensor([1.0, 2.0, 0.5, 3.0])
    posterior = errbar.fit(network(), [(X, Y)], last_layers=2, class_weights=by_class)
    same = collected({"last_layers": 2}, by_class[Y].double())
    assert near(posterior.information.dense(), same.dense())
    assert posterior.information.n_samples == pytest.approx(same.n_samples)
    posterior.save(tmp_path / "weighted.safetensors")
    loaded = errbar.load(tmp_path / "weighted.safetensors", network())
    assert loaded.information.task.class_weights == (1.0, 2.0, 0.5, 3.0)
    assert near(loaded.update([(X, Y)]).information.dense(), 2 * same.dense())
    with pytest.raises(errbar.LabelError, match="class_weights weigh each sample by its label"):
        loaded.update([X])
    with pytest.raises(errbar.MismatchError, match="different class weights"):
        posterior.information + same


def test_a_checkpoint_continues_with_weights(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Any]:
        yield from weighted()[:2]
        raise KeyboardInterrupt

    file, options = tmp_path / "part", {"last_layers": 2, "unpack": unpack, "every": 1}
    with pytest.raises(KeyboardInterrupt):
        errbar.collect(network(), interrupted(), checkpoint=file, **options)
    information = errbar.collect(network(), weighted(), checkpoint=file, **options)
    assert near(information.dense(), collected({"last_layers": 2}).dense())
    assert information.n_samples == pytest.approx(float(W.sum()))
    with pytest.raises(errbar.MismatchError, match="other data"):
        errbar.collect(network(), weighted(w=2 * W), checkpoint=file, **options)
    with pytest.raises(errbar.MismatchError, match="other class_weights"):
        errbar.collect(network(), weighted(), checkpoint=file, class_weights=[1, 1, 1, 2], **options)


class _Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        result: Tensor = self.out(pixels)
        return result


class _Wanting(_Named):
    def forward(self, pixels: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(pixels * weights[:, None])


class _Anything(_Named):
    def forward(self, pixels: Tensor, **more: Any) -> Tensor:
        return super().forward(pixels)


def test_weights_in_a_mapping() -> None:
    data = [{"pixels": X, "labels": Y, "weights": W}]
    posterior = errbar.fit(seeded(_Named), data, last_layers=1)
    parts = [{name: part[rows] for name, part in data[0].items()} for rows in (slice(0, 9), slice(9, None))]
    again = errbar.fit(seeded(_Named), parts, last_layers=1)
    expected = errbar.collect(seeded(_Named), weighted(), unpack=unpack, last_layers=1)
    for own in (posterior, again):
        assert near(own.information.dense(), expected.dense())
        assert own.information.n_samples == pytest.approx(float(W.sum()))
    # A prediction does not need them, and they do not matter to it.
    assert torch.equal(posterior.logits(data[0]).covariance, posterior.logits({"pixels": X}).covariance)
    wanting = errbar.fit(seeded(_Wanting), data, last_layers=1)
    assert wanting.information.n_samples == SIZE
    scaled = errbar.fit(seeded(_Named), [{"pixels": X * W[:, None], "labels": Y}], last_layers=1)
    assert near(wanting.information.dense(), scaled.information.dense())
    with pytest.raises(errbar.DataError, match="the model takes any keyword"):
        errbar.fit(seeded(_Anything), data, last_layers=1)


def test_a_data_set_with_weights_is_predicted_from_with_or_without_them() -> None:
    data = TensorDataset(X, Y, W)
    posterior = errbar.fit(network(), data, last_layers=1, unpack=unpack)
    assert posterior.information.n_samples == pytest.approx(float(W.sum()))
    expected = posterior.predict(X).pmf
    for batch in (X, (X,), (X, Y), (X, Y, W), DataLoader(data, batch_size=7)):
        assert torch.allclose(posterior.predict(batch).pmf, expected, atol=1e-12)
    gaussian = posterior.logits(DataLoader(data, batch_size=7))
    assert torch.allclose(gaussian.mean, posterior.logits(X).mean, atol=1e-12)


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (torch.where(torch.arange(SIZE) == 3, -1.0, 1.0), "A weight is negative, NaN or infinite"),
        (torch.where(torch.arange(SIZE) == 3, torch.nan, 1.0), "A weight is negative, NaN or infinite"),
        (torch.where(torch.arange(SIZE) == 3, torch.inf, 1.0), "A weight is negative, NaN or infinite"),
        (torch.ones(SIZE, 1), rf"weights are torch.float32 of shape \({SIZE}, 1\); expected \({SIZE},\)"),
        (torch.ones(SIZE, dtype=torch.bool), "weights are torch.bool"),
        ("heavy", "The weights are str; expected one number for each sample"),
        (torch.zeros(SIZE), "All weights are zero"),
    ],
)
def test_weights_that_make_no_sense(w: Any, message: str) -> None:
    with pytest.raises(errbar.DataError, match=message):
        errbar.fit(network(), [(X, Y, w)], last_layers=1, unpack=unpack)


@pytest.mark.parametrize("weights", [[1.0], [1, 2, 3, -1], [1, 2, 3, float("nan")], [0, 0, 0, 0], "heavy", 2.0])
def test_class_weights_that_make_no_sense(weights: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match="expected 4 finite numbers of zero or more, one for each class"):
        errbar.fit(network(), [(X, Y)], last_layers=1, class_weights=weights)


def test_class_weights_without_labels() -> None:
    with pytest.raises(errbar.LabelError, match=r"a batch has no labels; expected batches \(x, labels\)"):
        errbar.fit(network(), [X], last_layers=1, class_weights=[1, 2, 3, 4])


def test_float32_networks() -> None:
    model = seeded(mlp, dtype=torch.float32)
    x = draw(200, 5).float()
    w = torch.rand(200, generator=generator(4))
    options: dict[str, Any] = {"last_layers": 2, "unpack": lambda batch: ((batch[0],), {}, None, batch[1])}
    quick = errbar.collect(model, [(x, w)], **options)
    wide = errbar.collect(model, [(x, w)], precision="float64", **options)
    assert near(quick.dense(), wide.dense(), 1e-5)
