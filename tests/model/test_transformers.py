"""Hugging Face models, adapters, and heads of recurrent networks and vision transformers, all tiny and untrained."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
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


def told_of_diagonals(structure: str, name: str) -> AbstractContextManager[Any]:
    """`kron` says which layers it cannot take apart; nothing is said of the others."""
    if structure != "kron":
        return nullcontext()
    return pytest.warns(errbar.StructureNotice, match=f"'kron' treats .*{name}.* as 'diag' does")


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
    with told_of_diagonals(structure, "embeddings|wte"):
        posterior = errbar.fit(
            model, parts(batch), parameters="all", structure=structure, rank=40, prior=errbar.Prior(2.0)
        )
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


class Transposed(nn.Module):
    """Linear layers with transposed weights, the first applied to each token where there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = transformers.pytorch_utils.Conv1D(5, 4)
        self.last = transformers.pytorch_utils.Conv1D(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out: Tensor = self.last(h if h.ndim == 2 else h.mean(1))
        return out


class Twin(nn.Module):
    """The same function by layers of torch."""

    def __init__(self, model: Transposed) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        for name in ("first", "last"):
            layer, own = getattr(model, name), getattr(self, name)
            own.weight, own.bias = nn.Parameter(layer.weight.detach().T.clone()), nn.Parameter(layer.bias.detach())

    forward = Transposed.forward

    def order(self, names: tuple[str, ...]) -> Tensor:
        """Where each parameter of the transposed model lies among those of the twin."""
        parts, start = [], 0
        for name, parameter in self.named_parameters():
            if name in names:
                own = torch.arange(start, start + parameter.numel()).reshape(parameter.shape)
                parts.append(own.T.reshape(-1) if own.ndim == 2 else own)
                start += parameter.numel()
        return torch.cat(parts)


SELECTIONS: list[dict[str, Any]] = [
    {"parameters": "all"},
    {"last_layers": 1},
    {"last_layers": 1, "fisher": "eta"},
    {"parameters": ["first.weight", "last.bias"]},
]


@pytest.mark.parametrize("shape", [(9, 4), (9, 2, 4)], ids=["samples", "tokens"])
@pytest.mark.parametrize("select", SELECTIONS, ids=str)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_transposed_linear_layers_are_linear_layers(
    structure: str, select: dict[str, Any], shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The order is that of the model's own parameters, everything else that of a model of plain linear layers."""
    model = seeded(Transposed)
    twin = Twin(model).double()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {**select, "structure": structure, "rank": 60, "prior": errbar.Prior(2.0)}
    posterior, expected = errbar.fit(model, [x[:5], x[5:]], **options), errbar.fit(twin, [x[:5], x[5:]], **options)
    order = twin.order(posterior.information.parameter_names)

    def reordered(matrix: Tensor) -> Tensor:
        return matrix[order][:, order]

    close = {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(posterior.information.dense(), reordered(expected.information.dense()), **close)
    torch.testing.assert_close(posterior.covariance(), reordered(expected.covariance()), **close)
    torch.testing.assert_close(posterior.logits(x).covariance, expected.logits(x).covariance, **close)
    torch.testing.assert_close(
        posterior.joint_logits(x[:3]).covariance, expected.joint_logits(x[:3]).covariance, **close
    )
    if structure != "lowrank":
        torch.testing.assert_close(
            posterior.update([x[:2]]).forget([x[:2]]).covariance(), posterior.covariance(), **close
        )
    drawn = posterior.sample_parameters(4000, seed=3)
    flat = torch.cat([drawn[name].flatten(1) for name in posterior.information.parameter_names], 1)
    found, variance = flat.var(0), posterior.covariance().diagonal()
    assert bool(((found / variance - 1).abs() < 6 * (2 / 4000) ** 0.5).all())
    posterior.save(tmp_path / "file")
    loaded = errbar.load(tmp_path / "file", model)
    assert torch.equal(loaded.logits(x).covariance, posterior.logits(x).covariance)
    if structure == "dense" and select.get("fisher") != "eta":
        jacobian = jacrev(lambda values: functional_call(model, values, (x,)))(
            {name: p.detach() for name, p in model.named_parameters() if name in drawn}
        )
        rows = torch.cat([jacobian[name].detach().flatten(2) for name in drawn], 2)
        truth = rows @ posterior.covariance() @ rows.mT
        torch.testing.assert_close(posterior.logits(x).covariance, truth, **close)


def test_transposed_linear_layers_with_a_forward_of_their_own_are_something_else() -> None:
    class Scaled(transformers.pytorch_utils.Conv1D):  # type: ignore[misc, name-defined]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(x) * self.weight.norm()
            return out

    model = seeded(lambda: nn.Sequential(Scaled(5, 4), nn.Tanh(), nn.Linear(5, 3)))
    with pytest.warns(errbar.StructureNotice, match=r"'kron' treats '0' as 'diag' does, 20 of 43 parameters"):
        information = errbar.collect(model, [torch.ones(4, 4)], parameters="all", structure="kron")
    assert [block.layer.name for block in information.total.blocks] == ["2"]


def test_kronecker_factors_of_gpt2_and_what_is_diagonal_in_it() -> None:
    model, batch = gpt2(), sentences(6)
    notice = r"'kron' treats 'transformer\.wte', 'transformer\.wpe' as 'diag' does, 448 of 2,232 parameters"
    with pytest.warns(errbar.StructureNotice, match=notice) as told:
        information = errbar.collect(model, parts(batch), parameters="all", structure="kron")
    assert len(told) == 1
    inside = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    expected = [f"transformer.h.{block}.{name}" for block in range(2) for name in inside]
    assert [block.layer.name for block in information.total.blocks] == [*expected, "score"]
    plan = errbar.plan(model, batch)
    kron = [option for option in plan.options if option.structure == "kron"]
    assert kron[-1].diagonal == ("transformer.wte", "transformer.wpe")
    assert kron[0].diagonal == ()
    assert all(option.diagonal == () for option in plan.options if option.structure != "kron")
    assert str(plan).endswith("kron takes 'transformer.wte', 'transformer.wpe' as diag does: it cannot take them apart")


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
        with told_of_diagonals(structure if select.get("parameters") else "", "lstm"):
            posterior = errbar.fit(model, [x], structure=structure, rank=100, prior=errbar.Prior(2.0), **select)
        exact = errbar.fit(model, [x], prior=errbar.Prior(2.0), **select)
        ours, dense = posterior.logits(x).covariance, exact.logits(x).covariance
        if structure in ("dense", "lowrank"):
            torch.testing.assert_close(ours, dense, rtol=1e-6, atol=1e-8)
        assert bool((ours.diagonal(dim1=1, dim2=2) > 0).all())
