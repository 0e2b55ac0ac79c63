"""Information about several labels: Λ = diag f (1 − f), against autograd one sample and one label at a time."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._curvature.scores import ScoreDraws, sample_keys
from errbar._model.batch import Batch
from errbar._model.outputs import LABELS
from errbar.errors import ArgumentError, LabelError, MismatchError, ModelError

COUNT = 3
SIZE = 19
STRUCTURES = ("dense", "block", "kron", "diag", "lowrank")


class Convolutional(nn.Module):
    """A convolution, a norm, a scale that no module holds, and a head."""

    def __init__(self, labels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.head = nn.Linear(4, labels)

    def forward(self, x: Tensor) -> Tensor:
        image = x.reshape(-1, 1, 2, 3)
        return self.head(torch.tanh(self.norm(self.convolution(image))).flatten(1) * self.scale)


def network_called(name: str, labels: int = COUNT) -> nn.Module:
    torch.manual_seed(0)
    if name == "convolutional":
        return Convolutional(labels).double().eval()
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, labels)).double()


def data(labels: int = COUNT, *, missing: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(-1 if missing else 0, 2, (SIZE, labels), generator=generator)


def batches(x: Tensor, y: Tensor | None) -> list[tuple[Tensor, ...]]:
    parts = [slice(start, start + 8) for start in range(0, len(x), 8)]
    return [(x[part],) if y is None else (x[part], y[part]) for part in parts]


def collected(model: nn.Module, x: Tensor, y: Tensor | None, **options: object) -> errbar.Information:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        keywords = {"parameters": "all", "outputs": "labels", "rank": 200, **options}
        return errbar.collect(model, batches(x, y), **keywords)  # type: ignore[arg-type]


def rows_by_autograd(model: nn.Module, x: Tensor, y: Tensor | None, parameters: list[Tensor]) -> Tensor:
    """√Λ_ll ∂g_l/∂θ of one sample and one label after the other; nothing of a label that is missing."""
    rows = []
    for n, sample in enumerate(x):
        for label in range(COUNT):
            if y is not None and y[n, label] < 0:
                continue
            logit = model(sample[None])[0, label]
            gradient = torch.autograd.grad(logit, parameters, allow_unused=True, materialize_grads=True)
            f = torch.sigmoid(logit.detach())
            rows.append((f * (1 - f)).sqrt() * torch.cat([part.reshape(-1) for part in gradient]))
    return torch.stack(rows)


def cut(whole: Tensor, model: nn.Module, structure: str) -> Tensor:
    """What a structure keeps of the exact matrix."""
    if structure == "diag":
        return torch.diag(whole.diagonal())
    if structure != "block":
        return whole
    owners = [name.rpartition(".")[0] for name, p in model.named_parameters() for _ in range(p.numel())]
    same = torch.tensor([[first == second for second in owners] for first in owners])
    return whole * same


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("structure", ["dense", "block", "diag", "lowrank"])
@pytest.mark.parametrize("name", ["mlp", "convolutional"])
def test_information_is_that_of_each_label(name: str, structure: str, given: bool, fisher: str) -> None:
    model, (x, y) = network_called(name), data()
    labels = y if given else None
    rows = rows_by_autograd(model, x, labels, list(model.parameters()))
    information = collected(model, x, labels, structure=structure, fisher=fisher)
    torch.testing.assert_close(information.dense(), cut(rows.T @ rows, model, structure), rtol=1e-9, atol=1e-11)
    assert information.outputs == "labels"


@pytest.mark.parametrize("given", [True, False])
def test_kron_is_the_product_of_second_moments(given: bool) -> None:
    """Of a linear layer, (Σ h hᵀ)/N ⊗ Σ VᵀΛV; all inputs count for the first, whatever labels they have."""
    model, (x, y) = network_called("mlp"), data()
    labels = y if given else None
    information = collected(model, x, labels, structure="kron").dense()
    hidden = torch.tanh(model[0](x)).detach()
    logits = model(x).detach()
    variance = torch.sigmoid(logits) * torch.sigmoid(-logits) * (y >= 0 if given else 1)
    weight = model[2].weight.detach()
    slope = 1 - hidden.square()
    before = torch.einsum("nl,li,lj,ni,nj->ij", variance, weight, weight, slope, slope)
    for inner, outer, start, inputs, outputs in (
        (x, before, 0, 6, 5),
        (hidden, torch.diag(variance.sum(0)), 6 * 5 + 5, 5, COUNT),
    ):
        widened = torch.cat([inner, torch.ones(SIZE, 1, dtype=torch.float64)], 1)
        moments = torch.kron(outer, widened.T @ widened / SIZE)
        # Rows of the weight, each followed by its bias, as the flat vector has them apart.
        weights = [o * (inputs + 1) + i for o in range(outputs) for i in range(inputs)]
        order = torch.tensor(weights + [o * (inputs + 1) + inputs for o in range(outputs)])
        own = slice(start, start + outputs * (inputs + 1))
        torch.testing.assert_close(information[own, own], moments[order][:, order], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", ["dense", "block", "diag", "lowrank", "kron"])
def test_sampled_is_the_sum_of_squared_scores(structure: str) -> None:
    """One backward pass for each draw: Σ_l (y_l − f_l) ∂g_l/∂θ, with y drawn label by label."""
    model, (x, y) = network_called("mlp"), data()
    drawn = ScoreDraws(2, 0, LABELS).labels(sample_keys(Batch((x,))), model(x).detach())
    parameters = list(model.parameters())
    rows = []
    for n, sample in enumerate(x):
        for own in drawn[n]:
            logits = model(sample[None])[0]
            score = (own - torch.sigmoid(logits.detach())) * (y[n] >= 0)
            gradient = torch.autograd.grad(logits, parameters, score)
            rows.append(torch.cat([part.reshape(-1) for part in gradient]) / 2**0.5)
    stacked = torch.stack(rows)
    whole = stacked.T @ stacked
    information = collected(model, x, y, structure=structure, fisher="sampled", draws=2).dense()
    if structure == "kron":
        hidden = torch.cat([torch.tanh(model[0](x)).detach(), torch.ones(SIZE, 1, dtype=torch.float64)], 1)
        of_outputs = whole[-COUNT:, -COUNT:]  # the biases of the head
        torch.testing.assert_close(information[-COUNT:, -COUNT:], of_outputs * (hidden[:, -1] ** 2).mean())
        return
    torch.testing.assert_close(information, cut(whole, model, structure), rtol=1e-9, atol=1e-11)


def test_drawn_labels_are_those_of_the_network() -> None:
    logits = torch.tensor([[-2.0, 0.0, 1.5]], dtype=torch.float64).expand(4000, 3)
    keys = torch.arange(1, 4001)
    drawn = ScoreDraws(1, 3, LABELS).labels(keys, logits)[:, 0].double()
    f = torch.sigmoid(logits[0])
    assert float(((drawn.mean(0) - f) / (f * (1 - f) / 4000).sqrt()).abs().max()) < 4
    # One label says nothing about another.
    assert float(torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max()) < 4 / 4000**0.5


def test_a_missing_label_adds_no_information_and_no_likelihood() -> None:
    model, (x, y) = network_called("mlp"), data()
    y[:3].clamp_(min=0)
    y[1, 2] = -1
    with pytest.warns(UserWarning, match="is exactly zero, unless all labels are missing"):
        assert collected(model, x[:1], torch.full((1, COUNT), -1)).total.is_zero()
    apart = [
        collected(model, x[n : n + 1], torch.where(torch.arange(COUNT) == label, y[n : n + 1], -1))
        for n in range(3)
        for label in range(COUNT)
        if (n, label) != (1, 2)
    ]
    together = collected(model, x[:3], y[:3])
    torch.testing.assert_close(sum(apart).dense(), together.dense())  # type: ignore[attr-defined]
    logits = model(x[:3]).detach()
    truth = nn.functional.logsigmoid(torch.where(y[:3] == 1, logits, -logits))[y[:3] >= 0].sum()
    assert together.log_likelihood == pytest.approx(float(truth), rel=1e-12)
    assert sum(part.log_likelihood or 0 for part in apart) == pytest.approx(float(truth), rel=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_forgetting_gives_back_what_was_there(structure: str) -> None:
    model, (x, y) = network_called("mlp"), data()
    posterior = errbar.condition(collected(model, x[:12], y[:12], structure=structure), errbar.Prior(1.0))
    more = posterior.update([(x[12:], y[12:])])
    whole = errbar.condition(collected(model, x, y, structure=structure), errbar.Prior(1.0))
    assert more.log_evidence() == pytest.approx(whole.log_evidence(), rel=1e-9 if structure != "kron" else 1e-6)
    if structure != "lowrank":
        back = more.forget([(x[12:], y[12:])])
        torch.testing.assert_close(back.covariance(), posterior.covariance(), rtol=1e-7, atol=1e-9)


def test_a_file_keeps_what_the_outputs_mean(tmp_path: Path) -> None:
    model, (x, y) = network_called("mlp"), data()
    information = collected(model, x, y, structure="dense", fisher="sampled")
    information.save(tmp_path / "a.safetensors")
    again = errbar.merge([tmp_path / "a.safetensors"])
    assert again.outputs == "labels"
    torch.testing.assert_close((again + information).dense(), 2 * information.dense())
    assert errbar.info(tmp_path / "a.safetensors").outputs == "labels"  # type: ignore[union-attr]
    errbar.verify(tmp_path / "a.safetensors", model)


def test_ggn_and_eta_add_up_because_they_are_the_same() -> None:
    model, (x, y) = network_called("mlp"), data()
    both = collected(model, x, y) + collected(model, x, y, fisher="eta")
    torch.testing.assert_close(both.dense(), 2 * collected(model, x, y).dense())


# ------------------------------------------------------------------------------------------------------- mistakes


def test_information_of_other_outputs_is_refused() -> None:
    model, (x, y) = network_called("mlp"), data()
    with pytest.raises(MismatchError, match="Information of different outputs cannot be combined: labels and classes"):
        collected(model, x, y) + errbar.collect(model, [x], parameters="all")


@pytest.mark.parametrize("outputs", ["label", None, 3])
def test_outputs_that_do_not_exist_are_refused(outputs: object) -> None:
    model, (x, _) = network_called("mlp"), data()
    with pytest.raises(ArgumentError, match=r"outputs is .*; expected 'classes' \(one of M classes"):
        errbar.collect(model, [x], parameters="all", outputs=outputs)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"outputs is .*; expected 'classes'"):
        errbar.plan(model, x, outputs=outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2.0, 0.5, -2.0, float("nan")])
def test_labels_other_than_0_1_and_missing_are_refused(value: float) -> None:
    model, (x, y) = network_called("mlp"), data()
    wrong = y.double()
    wrong[4, 1] = value
    with pytest.raises(LabelError, match=rf"A label is {value}; expected 0, 1 or, where one is missing, -1"):
        collected(model, x, wrong)


def test_labels_of_another_shape_are_refused() -> None:
    model, (x, y) = network_called("mlp"), data()
    with pytest.raises(LabelError, match=r"shape \(8, 2\); expected \(8, 3\) for outputs='labels'.*Give one number"):
        collected(model, x, y[:, :2])
    with pytest.raises(LabelError, match=r"shape \(8,\); expected \(8, 3\).* the model is one of outputs='classes'"):
        collected(model, x, y[:, 0].abs())
    with pytest.raises(LabelError, match="expected 0, 1 or -1 of shape"):
        errbar.collect(model, [(x, ["a"] * SIZE)], parameters="all", outputs="labels")


def test_a_shape_that_fits_two_readings_asks_for_outputs() -> None:
    model, (x, y) = network_called("mlp"), data(missing=False)
    with pytest.raises(
        LabelError, match=r"argmax.*or, if each output is a label by itself, pass outputs='labels' to errbar"
    ):
        errbar.collect(model, [(x, y)], parameters="all")


def test_a_model_whose_outputs_are_not_logits_of_labels_is_refused() -> None:
    model, (x, _) = network_called("mlp"), data()
    with pytest.raises(ModelError, match="ends in a log-softmax, so its outputs are those of one of several classes"):
        errbar.collect(nn.Sequential(model, nn.LogSoftmax(1)), [x], parameters="all", outputs="labels")
    with pytest.raises(ModelError, match="The model ends in a Sigmoid"):
        errbar.collect(nn.Sequential(model, nn.Sigmoid()), [x], parameters="all", outputs="labels")
    with pytest.raises(
        ModelError, match=r"expected floating-point logits of shape \(19, labels\) for outputs='labels'"
    ):
        errbar.collect(nn.Sequential(model, nn.Unflatten(1, (3, 1))), [x], parameters="all", outputs="labels")
