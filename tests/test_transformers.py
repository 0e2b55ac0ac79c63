"""Hugging Face models, adapters, and heads of recurrent networks and vision transformers, all tiny and untrained."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import errbar

transformers = pytest.importorskip("transformers")
STRUCTURES = ["dense", "block", "kron", "diag", "lowrank"]
IDS = {"vocab_size": 40, "pad_token_id": 0}


def seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = make().double().eval()
        # Newly made heads are nearly zero: give every weight something to say.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.3)
        return model


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, num_labels=3, **IDS
    )
    return seeded(lambda: transformers.BertForSequenceClassification(config))


def gpt2() -> nn.Module:
    """Its layers are transposed linear ones of their own class, and the last token that is no padding decides."""
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, num_labels=3, **IDS)
    return seeded(lambda: transformers.GPT2ForSequenceClassification(config))


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4,
        num_channels=1, num_labels=3,
    )  # fmt: skip
    return seeded(lambda: transformers.ViTForImageClassification(config))


def sentences(count: int = 12, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (count, length), generator=generator)
    lengths = torch.randint(2, length + 1, (count, 1), generator=generator)
    mask = (torch.arange(length) < lengths).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.arange(count) % 3}


def pictures(count: int = 12) -> dict[str, Tensor]:
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"pixel_values": x, "labels": torch.arange(count) % 3}


MODELS = {"bert": (bert, sentences), "gpt2": (gpt2, sentences), "vit": (vit, pictures)}


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if name != "labels"}


def parts(batch: dict[str, Tensor], size: int = 5) -> list[dict[str, Tensor]]:
    count = len(batch["labels"])
    return [{name: value[i : i + size] for name, value in batch.items()} for i in range(0, count, size)]


def truth(model: nn.Module, batch: dict[str, Tensor], names: tuple[str, ...], prior: float) -> tuple[Tensor, Tensor]:
    """P^g and the information, by Jacobians of the whole model."""
    given = without_labels(batch)
    values = {name: p.detach() for name, p in model.named_parameters() if name in names}

    def logits(chosen: dict[str, Tensor]) -> Tensor:
        output: Tensor = functional_call(model, chosen, (), given).logits
        return output

    # Fused attention kernels have no batching rule for their derivative.
    with sdpa_kernel(SDPBackend.MATH):
        by_name = jacrev(logits)(values)
    jacobian = torch.cat([by_name[name].detach().flatten(2) for name in names], 2)
    pmf = logits(values).detach().softmax(1)
    weight = torch.diag_embed(pmf) - pmf[:, :, None] * pmf[:, None, :]
    information = torch.einsum("bmi,bmk,bkj->ij", jacobian, weight, jacobian)
    covariance = torch.linalg.inv(information + prior * torch.eye(len(information), dtype=torch.float64))
    return jacobian @ covariance @ jacobian.mT, information


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("last_layers", [1, 2, 3])
def test_models_of_hugging_face_are_exact(name: str, last_layers: int) -> None:
    make, data = MODELS[name]
    model, batch = make(), data()
    posterior = errbar.fit(model, parts(batch), last_layers=last_layers, prior=errbar.Prior(2.0))
    covariance, information = truth(model, batch, posterior.information.parameter_names, 2.0)
    torch.testing.assert_close(posterior.information.dense(), information, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(posterior.logits(without_labels(batch)).covariance, covariance, rtol=1e-7, atol=1e-9)
    logits = model(**without_labels(batch)).logits.detach()
    likelihood = float(logits.log_softmax(1)[range(12), batch["labels"]].sum())
    assert posterior.information.log_likelihood == pytest.approx(likelihood)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_whole_models_of_hugging_face_in_every_structure(name: str, structure: str) -> None:
    make, data = MODELS[name]
    model, batch = make(), data(6)
    n = sum(p.numel() for p in model.parameters())
    posterior = errbar.fit(model, parts(batch), parameters="all", structure=structure, rank=40, prior=errbar.Prior(2.0))
    assert posterior.information.n_parameters == n
    prediction = posterior.predict(without_labels(batch))
    torch.testing.assert_close(prediction.pmf.sum(1), torch.ones(6, dtype=torch.float64))
    assert bool((prediction.std > 0).all())
    if structure in ("dense", "lowrank"):
        names = posterior.information.parameter_names
        covariance, _ = truth(model, batch, names, 2.0)
        torch.testing.assert_close(posterior.logits(without_labels(batch)).covariance, covariance, rtol=1e-6, atol=1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.CalibrationWarning)  # six sentences do not determine a temperature
        assert errbar.calibrate(posterior, parts(batch), fit=("temperature",)).temperature != 1.0


class LowRankAdapter(nn.Module):
    """y = W x + B A x with W frozen."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False).double()
        self.up = nn.Linear(rank, base.out_features, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    model = bert().requires_grad_(False)
    for layer in model.bert.encoder.layer:  # type: ignore[union-attr]
        attention = layer.attention.self  # type: ignore[union-attr]
        attention.query, attention.value = LowRankAdapter(attention.query), LowRankAdapter(attention.value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for name, parameter in model.named_parameters():
            if ".down." in name or ".up." in name:
                nn.init.normal_(parameter, std=0.3)
                parameter.requires_grad_()
    return model


@pytest.mark.parametrize("structure", STRUCTURES)
def test_adapters_in_a_frozen_network(structure: str) -> None:
    model, batch = adapted(), sentences()
    posterior = errbar.fit(
        model, parts(batch), parameters="trainable", structure=structure, rank=40, prior=errbar.Prior(2.0)
    )
    names = posterior.information.parameter_names
    assert set(names) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(names) == 8
    if structure in ("dense", "lowrank"):
        covariance, _ = truth(model, batch, names, 2.0)
        torch.testing.assert_close(posterior.logits(without_labels(batch)).covariance, covariance, rtol=1e-6, atol=1e-8)


def test_trainable_parameters_are_asked_for_and_not_assumed() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False)
    x = torch.ones(2, 3)
    assert errbar.collect(model, [x], last_layers=1).n_parameters == 10
    with pytest.raises(errbar.SelectionError, match="no parameter of the model requires gradients"):
        errbar.collect(model, [x], parameters="trainable")
    model[0].requires_grad_()
    assert errbar.collect(model, [x], parameters="trainable").parameter_names == ("0.weight", "0.bias")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


@pytest.mark.parametrize("structure", STRUCTURES)
def test_recurrent_networks_in_every_structure(structure: str) -> None:
    model = seeded(Recurrent)
    x = torch.randn(10, 5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for select in ({"last_layers": 1}, {"parameters": "all"}):
        posterior = errbar.fit(model, [x], structure=structure, rank=100, prior=errbar.Prior(2.0), **select)
        exact = errbar.fit(model, [x], prior=errbar.Prior(2.0), **select)
        ours, dense = posterior.logits(x).covariance, exact.logits(x).covariance
        if structure in ("dense", "lowrank"):
            torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-8)
        assert bool((ours.diagonal(dim1=1, dim2=2) > 0).all())
