"""The fast path is taken where it should be, and gives what generic Jacobians give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import errbar
from data import draw
from errbar._curvature import banded
from errbar._curvature.per_class import PerClassSum
from errbar._derivative.layerwise import LayerwiseRoute
from errbar._derivative.route import Route
from errbar._distributions.covariance import DiagonalCovariance
from errbar._model.batch import batches
from errbar._posterior.collect import accumulate
from errbar._posterior.information import Information
from networks import mlp, one_logit, seeded


class Between(nn.Module):
    """Selected linear layers with a normalisation, a product and a skip connection between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.LayerNorm(6)
        self.gate = nn.Linear(5, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)) * torch.sigmoid(self.gate(x))
        return self.last(hidden) + 0.1 * self.last.in_features * hidden[:, :3]


class TokenHead(nn.Module):
    """A transformer block, a linear layer applied to each token, the mean over tokens, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.tokens = nn.Linear(4, 3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(self.block(x))).mean(1))


def without_bias() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 4, bias=False)
    )


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5), nn.ReLU(), nn.Linear(5, 3)
    )


def frozen() -> nn.Module:
    model = mlp()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 75), nn.Tanh(), nn.Linear(75, 3))


CASES = {
    "mlp, last layer": (mlp, (5,), {"last_layers": 1}),
    "mlp, two layers": (mlp, (5,), {"last_layers": 2}),
    "mlp, all layers": (mlp, (5,), {"parameters": "all"}),
    "weights without biases": (mlp, (5,), {"parameters": ["2.weight", "4.weight"]}),
    "biases without weights": (mlp, (5,), {"parameters": ["2.bias", "4.bias"]}),
    "layers without bias": (without_bias, (5,), {"parameters": "all"}),
    "head of a convolutional network": (convolutional, (1, 6, 6), {"last_layers": 2}),
    "frozen layers": (frozen, (5,), {"last_layers": 2}),
    "other layers between": (Between, (5,), {"parameters": ["first", "gate", "last"]}),
    "many inputs, few outputs": (wide, (5,), {"last_layers": 1}),
    "many inputs, few outputs, two layers": (wide, (5,), {"last_layers": 2}),
    "one logit": (one_logit, (5,), {"last_layers": 2}),
    "a few tokens": (TokenHead, (2, 4), {"last_layers": 2}),
}


def generic(information: Information, data: list[tuple[Tensor, Tensor]]) -> Information:
    """The same information by generic Jacobians."""
    by_layer = LayerwiseRoute.of(information.selection, information.task.n_classes, ())
    task = replace(information.task, route=Route((), by_layer=by_layer))
    return accumulate(task, batches(data))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_the_fast_path_is_taken(case: str, fisher: str, no_jacobians: None) -> None:
    make, shape, select = CASES[case]
    information = errbar.collect(seeded(make), [draw(9, *shape)], fisher=fisher, **select)
    assert information.task.route.factored
    posterior = errbar.condition(information, errbar.Prior(2.0))
    posterior.predict(draw(4, *shape, seed=2))
    posterior.joint_logits(draw(3, *shape, seed=3))
    posterior.update([draw(2, *shape, seed=4)])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_the_fast_path_equals_generic_jacobians(case: str, fisher: str) -> None:
    make, shape, select = CASES[case]
    model = seeded(make)
    data = [(draw(9, *shape), torch.arange(9) % 2), (draw(5, *shape, seed=7), torch.arange(5) % 2)]
    fast = errbar.collect(model, data, fisher=fisher, **select)
    slow = generic(fast, data)
    scale = slow.dense().abs().max()
    assert (fast.dense() - slow.dense()).abs().max() < 1e-12 * scale
    assert fast.log_likelihood == pytest.approx(slow.log_likelihood)
    x = draw(12, *shape, seed=2)
    ours, reference = (errbar.condition(information, errbar.Prior(0.7)) for information in (fast, slow))
    difference = ours.logits(x).covariance - reference.logits(x).covariance
    assert difference.abs().max() < 1e-9 * reference.logits(x).covariance.abs().max()
    joint = ours.joint_logits(x[:3]).covariance - reference.joint_logits(x[:3]).covariance
    assert joint.abs().max() < 1e-9 * reference.joint_logits(x[:3]).covariance.abs().max()


def test_many_inputs_and_few_outputs_make_no_product_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise AssertionError("rows h_a h_b were formed")

    monkeypatch.setattr("errbar._curvature.packed.product_rows", forbidden)
    posterior = errbar.fit(seeded(wide), [draw(9, 5)], last_layers=1, prior=errbar.Prior(2.0))
    posterior.predict(draw(4, 5, seed=2))


def test_bands_are_the_packed_triangle_in_another_order() -> None:
    packed_rows = draw(70 * 71 // 2, 4)
    assert torch.equal(banded.to_packed(banded.from_packed(packed_rows, 70)), packed_rows)


def test_many_tokens_take_the_summed_gradient() -> None:
    """The pairs of 12 tokens cost more than five classes do: J is assembled from V and h, and is the same."""
    model = seeded(TokenHead)
    data = [(draw(6, 12, 4), torch.arange(6) % 5)]
    fast = errbar.collect(model, data, last_layers=2)
    assert not fast.task.route.factored
    assert len(fast.task.route.by_layer.layers) == 2
    slow = generic(fast, data)
    assert (fast.dense() - slow.dense()).abs().max() < 1e-12 * slow.dense().abs().max()


def test_other_layers_beside_linear_ones_take_generic_jacobians_for_themselves_only() -> None:
    """A norm layer that another one shares its scales with is no plain one."""
    model = seeded(Between)
    model.norm.register_parameter("twin", model.norm.bias)
    data = [(draw(6, 5), torch.arange(6) % 3)]
    fast = errbar.collect(model, data, parameters=["first", "norm", "last"])
    assert fast.task.route.by_layer.rest.names == ("norm.bias",)
    slow = generic(fast, data)
    assert (fast.dense() - slow.dense()).abs().max() < 1e-12 * slow.dense().abs().max()


def test_a_weight_that_is_used_elsewhere_too_is_not_taken_for_a_plain_layer() -> None:
    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x) / self.last.weight.norm()

    information = errbar.collect(seeded(Normalised), [draw(4, 5)], last_layers=1)
    assert not information.task.route.layers


@pytest.mark.parametrize("make", [mlp, without_bias])
def test_a_last_layer_alone_with_eta_keeps_one_matrix_for_each_class(make: Callable[[], nn.Module]) -> None:
    model, x = seeded(make), draw(6, 5, seed=2)
    data = [(draw(20, 5), torch.arange(20) % 4)]
    posterior = errbar.fit(model, data, last_layers=1, fisher="eta", prior=errbar.Prior(1.5))
    assert isinstance(posterior.information.total, PerClassSum)
    gaussian = posterior.logits(x)
    assert isinstance(gaussian.form, DiagonalCovariance)
    reference = errbar.condition(generic_dense(posterior.information, data), errbar.Prior(1.5))
    torch.testing.assert_close(posterior.covariance(), reference.covariance(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gaussian.covariance, reference.logits(x).covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        posterior.joint_logits(x).covariance, reference.joint_logits(x).covariance, rtol=1e-9, atol=1e-12
    )
    assert posterior.log_evidence() == pytest.approx(reference.log_evidence())
    update = posterior.update(data).forget(data)
    torch.testing.assert_close(update.covariance(), posterior.covariance())


def generic_dense(information: Information, data: list[tuple[Tensor, Tensor]]) -> Information:
    """The same information as one dense matrix, which the `eta` last layer does not take by itself."""
    slow = generic(information, data)
    assert not isinstance(slow.total, PerClassSum)
    return slow


def test_samples_of_independent_logits_have_their_moments() -> None:
    """The diagonal form draws each logit; the dense form draws contrasts: the PMFs agree within Monte Carlo error."""
    K = 40_000
    mean, variance = draw(5, 4), draw(5, 4, seed=2).square()
    diagonal = errbar.LogitGaussian(mean, DiagonalCovariance(variance)).predict(K, seed=1)
    dense = errbar.LogitGaussian(mean, torch.diag_embed(variance)).predict(K, seed=2)
    error = 4 * (diagonal.standard_error.square() + dense.standard_error.square()).sqrt()
    assert ((diagonal.pmf - dense.pmf).abs() < error + 1e-12).all()


def test_many_classes_never_make_a_matrix_of_classes_by_classes() -> None:
    """3100 classes: one M × M matrix of float32 alone would have 38 MB, M p × M p half a terabyte."""
    model = nn.Linear(16, 3100)
    posterior = errbar.fit(model, [draw(64, 16).float()], last_layers=1, fisher="eta")
    prediction = posterior.predict(draw(1, 16, seed=2).float(), samples=200)
    assert prediction.pmf.shape == (1, 3100)
    assert prediction.std.shape == (1, 3100)
    with pytest.raises(errbar.SizeError, match=r"52,700 × 52,700 matrix needs 20\.\d GiB"):
        posterior.covariance()


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that an operation makes."""

    numbers = 0

    def __torch_dispatch__(self, operation: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **kwargs or {})
        self.numbers = max(self.numbers, made.numel() if isinstance(made, Tensor) else 0)
        return made


def test_contrasts_of_many_classes_become_logits_without_more_than_the_result() -> None:
    """40 classes and 4 entries of h: the sum has (40·4)² numbers, a table from contrasts to logits 40⁴/4."""
    model, x = seeded(lambda: nn.Linear(3, 40)), draw(10, 3)
    with Largest() as largest:
        made = errbar.collect(model, [x], last_layers=1).dense()
    assert largest.numbers <= 160**2
    f = torch.softmax(model(x).detach(), 1)
    h = torch.cat([x, torch.ones(10, 1, dtype=x.dtype)], 1)
    whole = torch.einsum("nij,na,nb->iajb", torch.diag_embed(f) - f[:, :, None] * f[:, None, :], h, h)
    # Weights first, then biases, as the parameters lie.
    order = torch.cat([torch.arange(160).reshape(40, 4)[:, :3].reshape(-1), torch.arange(3, 160, 4)])
    torch.testing.assert_close(made, whole.reshape(160, 160)[order][:, order], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("draws", ["antithetic", "sobol"])
def test_better_draws_have_a_smaller_error_than_random_ones(draws: str) -> None:
    root = draw(20, 5, 5)
    gaussian = errbar.LogitGaussian(draw(20, 5, seed=2), root @ root.mT)
    truth = gaussian.predict(200_000, seed=9).pmf

    def error(kind: str) -> float:
        tries = [gaussian.predict(500, seed=seed, draws=kind).pmf - truth for seed in range(8)]
        return float(torch.stack(tries).square().mean())

    assert error(draws) < 0.7 * error("random")


def test_draws_of_an_unknown_kind_are_refused() -> None:
    gaussian = errbar.LogitGaussian(torch.zeros(1, 3), torch.eye(3)[None])
    with pytest.raises(errbar.ArgumentError, match=r"draws is 'halton'; expected 'random', 'antithetic' or 'sobol'"):
        gaussian.predict(draws="halton")


def test_the_mean_field_form_depends_on_contrasts_only_and_is_near_for_two_classes() -> None:
    root = draw(30, 2, 2)
    gaussian = errbar.LogitGaussian(draw(30, 2, seed=2), root @ root.mT)
    shifted = errbar.LogitGaussian(gaussian.mean + 5, gaussian.covariance + 7)
    torch.testing.assert_close(gaussian.mean_field_pmf(), shifted.mean_field_pmf())
    assert (gaussian.mean_field_pmf() - gaussian.predict(100_000).pmf).abs().max() < 0.03
    certain = gaussian.scaled(0.0)
    torch.testing.assert_close(certain.mean_field_pmf(), torch.softmax(gaussian.mean, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_products_stay_near_float64_ones(dtype: torch.dtype) -> None:
    model = seeded(mlp).to(dtype)
    x = draw(300, 5).to(dtype)
    fast = errbar.fit(model, [x], last_layers=2, prior=errbar.Prior(2.0))
    exact = errbar.fit(model, [x], last_layers=2, prior=errbar.Prior(2.0), precision="float64")
    difference = (fast.covariance() - exact.covariance()).abs().max()
    assert difference < 1e-5 * exact.covariance().abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_gives_what_a_cpu_gives(case: str) -> None:
    make, shape, select = CASES[case]
    model = seeded(make)
    data = [(draw(40, *shape), torch.arange(40) % 2)]
    posterior = errbar.fit(model, data, prior=errbar.Prior(2.0), **select)
    moved = posterior.to("cuda")
    fitted = errbar.fit(moved.model, data, prior=errbar.Prior(2.0), **select)
    x = draw(6, *shape, seed=2)
    for other in (moved, fitted):
        assert other.predict(x).pmf.device.type == "cuda"
        torch.testing.assert_close(other.covariance().cpu(), posterior.covariance(), rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(other.predict(x).pmf.cpu(), posterior.predict(x).pmf, rtol=1e-6, atol=1e-8)
