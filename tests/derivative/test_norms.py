"""Norm layers give their Jacobians with the backward pass of the others, and these are what autograd says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import errbar
from data import draw
from errbar._derivative.columns import norm_layers
from errbar._derivative.layerwise import LayerwiseRoute
from errbar._derivative.trace import UnlikeFirstBatchError
from errbar._model.batch import to_batch
from errbar._model.network import Network
from errbar._model.selection import select

FLOAT64 = torch.float64


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A float64 model in which no scale is one, no shift zero, and running statistics are those of some data."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) / max(1, parameter[0].numel()) ** 0.5)
            for name, buffer in model.named_buffers():
                if name.endswith(("running_mean", "running_var")):
                    buffer.copy_(torch.rand(buffer.shape) + 0.5)
        return model


class Twice(nn.Module):
    """A norm layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(torch.tanh(self.norm(input=x)) + x)))


class Tokens(nn.Module):
    """A layer norm and a root-mean-square norm over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.LayerNorm(4), nn.RMSNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(torch.tanh(self.first(x))).mean(1))


def flat(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), *norms, nn.ReLU(inplace=True), nn.Linear(6, 3))


def pictures(norm: nn.Module, activation: nn.Module | None = None) -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3), norm, activation or nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(36, 3)]
    return nn.Sequential(*layers)


def volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Tanh(), nn.Flatten(), nn.Linear(2, 3))


# model, shape of an input, which modules are selected
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "batch norm": (lambda: flat(nn.BatchNorm1d(6)), (4,), ["1", "3"]),
    "batch norm of pictures": (lambda: pictures(nn.BatchNorm2d(4)), (2, 5, 5), ["1", "4"]),
    "batch norm of volumes": (volumes, (1, 2, 2, 2), ["1", "4"]),
    "layer norm": (lambda: flat(nn.LayerNorm(6)), (4,), ["1", "3"]),
    "layer norm over two dimensions": (lambda: pictures(nn.LayerNorm((3, 3))), (2, 5, 5), ["1", "4"]),
    "layer norm without shifts": (lambda: flat(nn.LayerNorm(6, bias=False)), (4,), ["1", "3"]),
    "shifts alone": (lambda: flat(nn.LayerNorm(6)), (4,), ["1.bias", "3"]),
    "scales alone": (lambda: flat(nn.BatchNorm1d(6)), (4,), ["1.weight"]),
    "group norm": (lambda: pictures(nn.GroupNorm(2, 4)), (2, 5, 5), ["1", "4"]),
    "root mean square": (lambda: flat(nn.RMSNorm(6)), (4,), ["1", "3"]),
    "slopes below zero": (lambda: flat(nn.PReLU(6)), (4,), ["1", "3"]),
    "one slope of pictures": (lambda: pictures(nn.PReLU(), nn.Tanh()), (2, 5, 5), ["1", "4"]),
    "slopes of pictures": (lambda: pictures(nn.PReLU(4), nn.Tanh()), (2, 5, 5), ["0", "1"]),
    "two in a row": (lambda: flat(nn.LayerNorm(6), nn.BatchNorm1d(6)), (4,), ["1", "2"]),
    "first and last": (lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3), nn.LayerNorm(3)), (4,), ["0", "2"]),
    "called twice": (Twice, (4,), ["norm", "head"]),
    "over tokens": (Tokens, (5, 4), ["first", "second", "head"]),
    "everything": (lambda: pictures(nn.BatchNorm2d(4)), (2, 5, 5), ["0", "1", "4"]),
}


def by_autograd(model: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    """One sample and one logit after the other."""
    parameters = [dict(model.named_parameters())[name] for name in names]
    rows = []
    for sample in x:
        logits = model(sample[None])[0]
        gradients = [torch.autograd.grad(logit, parameters, retain_graph=True) for logit in logits]
        rows.append(torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in gradients]))
    return torch.stack(rows)


def planned(model: nn.Module, x: Tensor, modules: list[str]) -> tuple[Network, Any, LayerwiseRoute]:
    network, batch = Network(model), to_batch(x)
    selection = select(network, (), last_layers=None, parameters=modules)
    return network, selection, LayerwiseRoute.plan(network, selection, batch)


@pytest.mark.parametrize("case", CASES)
def test_jacobians_are_those_of_autograd(case: str, no_jacobians: None) -> None:
    make, shape, modules = CASES[case]
    model, x = seeded(make), draw(7, *shape)
    network, selection, route = planned(model, x, modules)
    assert not route.rest.names
    logits, derivative = route.differentiate(network, to_batch(x))
    truth = by_autograd(model, selection.names, x)
    assert torch.equal(logits, model(x))
    assert (derivative.jacobian() - truth).abs().max() <= 1e-12 * truth.abs().max()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag"])
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_the_information_of_norms_is_what_the_paper_writes(
    case: str, structure: Any, fisher: Any, no_jacobians: None
) -> None:
    """On the diagonal, which all structures have exactly for a norm: Σ_n Σ_ml J_mi Λ_ml J_li."""
    make, shape, modules = CASES[case]
    model, x = seeded(make), draw(9, *shape)
    information = errbar.collect(model, [x[:4], x[4:]], parameters=modules, structure=structure, fisher=fisher)
    J, f = by_autograd(model, information.selection.names, x), torch.softmax(model(x), 1).detach()
    weight = torch.diag_embed(f) - f[:, :, None] * f[:, None, :]
    weight = weight if fisher == "ggn" else torch.diag_embed(torch.diagonal(weight, dim1=1, dim2=2))
    truth = torch.einsum("nmi,nml,nli->i", J, weight, J)
    norms = norm_layers(Network(model), information.selection)
    assert norms
    for norm in norms:
        for where, start in norm.spans:
            own = slice(start, start + where.stop - where.start)
            torch.testing.assert_close(information.dense().diagonal()[own], truth[own], rtol=1e-10, atol=1e-14)


class Doubled(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Flattened(nn.Module):
    """The norm sees tokens, not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.flatten(0, 1)).reshape(x.shape).mean(1))


class Regular(nn.Module):
    """The scales are used outside the norm as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)) * self.norm.weight.square().sum()


class Stacked(nn.Module):
    """Two views of all samples: the first dimension is as long as that of two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(torch.stack([x, x.flip(1).square()]))
        return self.head(torch.tanh(torch.cat([first, second], 1)))


class Recurrent(nn.Module):
    """The last state of both directions, (2, B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.GRU(4, 3, bidirectional=True, batch_first=True), nn.LayerNorm(3)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.norm(self.body(x)[1])
        return self.head(torch.tanh(torch.cat([first, second], 1)))


class Enabled(nn.Module):
    """Gradients are on around the norm only; the layer before it does not run over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.flatten(0, 1)).reshape(x.shape).mean(1)
        with torch.enable_grad():
            hidden = self.norm(hidden)
        return self.head(torch.tanh(hidden))


class Again(nn.Module):
    """What is between the norm and the head is computed again on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.head(checkpoint(lambda value: torch.tanh(self.norm(value)), hidden, use_reentrant=False))


class Padded(nn.Module):
    """An encoder that makes nested tensors of padded sequences."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.norm, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        return self.head(self.norm(x, src_key_padding_mask=padding)[:, 0])


ALONE = {
    "a forward of its own": (lambda: flat(Doubled(6)), (4,), ("1.weight", "1.bias")),
    "instance norm": (lambda: pictures(nn.InstanceNorm2d(4, affine=True)), (2, 5, 5), ("1.weight", "1.bias")),
    "tokens as samples": (Flattened, (5, 4), ("norm.weight", "norm.bias")),
    "scales used elsewhere": (Regular, (4,), ("norm.weight", "norm.bias")),
    "two views first": (Stacked, (4,), ("norm.weight", "norm.bias")),
    "two directions first": (Recurrent, (5, 4), ("norm.weight", "norm.bias")),
    "gradients enabled": (Enabled, (5, 4), ("first.weight", "first.bias", "norm.weight", "norm.bias")),
    "computed again": (Again, (4,), ("first.weight", "first.bias", "norm.weight", "norm.bias")),
    "nested tensors": (Padded, (5, 4), ("norm.layers.0.norm1.weight", "norm.layers.0.linear1.weight")),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("structure", ["dense", "diag"])
def test_what_is_no_plain_norm_goes_by_itself(case: str, structure: Any) -> None:
    make, shape, alone = ALONE[case]
    model, x = seeded(make), draw(6, *shape)
    _, _, route = planned(model, x, list(alone))
    assert set(route.rest.names) == set(alone)
    # A batch of two samples looks like two views of one.
    information = errbar.collect(model, [x[:2], x[2:4], x[4:]], parameters=list(alone), structure=structure)
    J, f = by_autograd(model, information.selection.names, x), torch.softmax(model(x), 1).detach()
    truth = torch.einsum("nmi,nml,nlj->ij", J, torch.diag_embed(f) - f[:, :, None] * f[:, None, :], J)
    truth = truth if structure == "dense" else torch.diag(truth.diagonal())
    assert (information.dense() - truth).abs().max() <= 1e-12 * truth.abs().max()


class Choosy(nn.Module):
    """Some samples go through the norm, the others pass it by."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return self.head(x.index_copy(0, chosen, self.norm(x[chosen])))


def test_a_norm_that_some_samples_pass_by_is_seen() -> None:
    """Sums go sample by sample then, as they do for any control flow; Kronecker factors are refused."""
    model, mixed = seeded(Choosy), draw(8, 4)
    chosen = mixed[mixed[:, 0] > 0]
    assert 0 < len(chosen) < len(mixed)
    with pytest.raises(UnlikeFirstBatchError, match="'norm' ran with one input for each sample in the first batch"):
        errbar.collect(model, [chosen, mixed], parameters="all", structure="kron")
    x = torch.cat([chosen, mixed])
    for structure in ("dense", "diag"):
        posterior = errbar.fit(model, [chosen, mixed], parameters="all", structure=structure, prior=errbar.Prior(1.0))
        J, f = by_autograd(model, posterior.information.selection.names, x), torch.softmax(model(x), 1).detach()
        truth = torch.einsum("nmi,nml,nlj->ij", J, torch.diag_embed(f) - f[:, :, None] * f[:, None, :], J)
        truth = truth if structure == "dense" else torch.diag(truth.diagonal())
        torch.testing.assert_close(posterior.information.dense(), truth, rtol=1e-10, atol=1e-12)
        covariance = J @ posterior.covariance() @ J.mT
        torch.testing.assert_close(posterior.logits(x).covariance, covariance, rtol=1e-10, atol=1e-12)
        joint = posterior.joint_logits(x).covariance.flatten(0, 1).flatten(1)
        torch.testing.assert_close(joint, J.flatten(0, 1) @ posterior.covariance() @ J.flatten(0, 1).T)


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag"])
def test_a_file_keeps_how_norms_are_differentiated(structure: Any, tmp_path: Path, no_jacobians: None) -> None:
    model, x = seeded(lambda: pictures(nn.BatchNorm2d(4))), draw(6, 2, 5, 5)
    posterior = errbar.fit(model, [x], parameters=["1", "4"], structure=structure, prior=errbar.Prior(2.0))
    posterior.save(tmp_path / "p.safetensors")
    loaded = errbar.load(tmp_path / "p.safetensors", model)
    assert torch.equal(loaded.logits(x).covariance, posterior.logits(x).covariance)


def test_a_file_about_a_norm_is_refused_with_another_module_in_its_place(tmp_path: Path) -> None:
    model, x = seeded(lambda: flat(nn.LayerNorm(6))), draw(6, 4)
    errbar.fit(model, [x], parameters=["1", "3"], prior=errbar.Prior(2.0)).save(tmp_path / "p.safetensors")
    other = seeded(lambda: flat(Doubled(6)))
    other.load_state_dict(model.state_dict())
    with pytest.raises(errbar.MismatchError, match="made with the layers 1, which the model does not have as they"):
        errbar.load(tmp_path / "p.safetensors", other)
