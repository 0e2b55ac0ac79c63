"""`fisher="sampled"`: drawn labels in place of all classes, against autograd one sample and one draw at a time."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import errbar
from errbar._curvature.scores import ScoreDraws, sample_keys, uniforms
from errbar._model.batch import Batch

CLASSES = 5
STRUCTURES = ("dense", "block", "kron", "diag", "lowrank")
EXACT = ("dense", "block", "diag")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, CLASSES)).double()


class Convolutional(nn.Module):
    """A convolution, a norm, a scale that no module holds, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 2)
        self.norm = nn.BatchNorm2d(2)
        self.scale = nn.Parameter(torch.tensor(1.2))
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        image = x[:, :6].reshape(-1, 1, 2, 3)
        return self.head(torch.tanh(self.norm(self.convolution(image))).flatten(1) * self.scale)


def convolutional() -> nn.Module:
    torch.manual_seed(1)
    return Convolutional().double().eval()


NETWORKS = {"mlp": mlp, "convolutional": convolutional}


def network_called(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]()


def inputs(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fitted(model: nn.Module, x: Tensor, **options: object) -> errbar.Information:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        return errbar.collect(model, [x], **{"parameters": "all", "fisher": "sampled", **options})  # type: ignore[arg-type]


def scores_by_autograd(model: nn.Module, x: Tensor, draws: int, seed: int) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """∂ ln f_y/∂θ for each sample and each of its drawn labels, one after the other: (N k, n)."""
    labels = ScoreDraws(draws, seed).labels(sample_keys(Batch((x,))), model(x).detach())
    parameters = list(model.named_parameters())
    rows = []
    for sample, own in zip(x, labels, strict=True):
        for label in own:
            log_probability = torch.log_softmax(model(sample[None])[0], 0)[label]
            gradient = torch.autograd.grad(log_probability, [parameter for _, parameter in parameters])
            rows.append(torch.cat([part.reshape(-1) for part in gradient]))
    return torch.stack(rows), parameters


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("structure", EXACT)
@pytest.mark.parametrize("name", NETWORKS)
def test_information_is_the_sum_of_squared_scores(name: str, structure: str, draws: int) -> None:
    model, x = network_called(name), inputs(23)
    rows, parameters = scores_by_autograd(model, x, draws, seed=3)
    expected = rows.T @ rows / draws
    measured = fitted(model, x, structure=structure, draws=draws, seed=3).dense()
    if structure == "diag":
        expected = torch.diag(expected.diagonal())
    if structure == "block":
        owners = [key.rpartition(".")[0] for key, parameter in parameters for _ in range(parameter.numel())]
        same = torch.tensor([[first == second for second in owners] for first in owners])
        expected = expected * same
    torch.testing.assert_close(measured, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_sketch_with_room_for_all_rows_is_exact(name: str) -> None:
    model, x = network_called(name), inputs(9)
    rows, _ = scores_by_autograd(model, x, 2, seed=0)
    measured = fitted(model, x, structure="lowrank", rank=40, draws=2).dense()
    torch.testing.assert_close(measured, rows.T @ rows / 2, rtol=1e-8, atol=1e-10)


def test_kronecker_factors_are_moments_of_inputs_and_scores() -> None:
    model, x = network_called("mlp"), inputs(31)
    labels = ScoreDraws(2, 0).labels(sample_keys(Batch((x,))), model(x).detach())
    scores = (torch.nn.functional.one_hot(labels, CLASSES) - torch.softmax(model(x).detach(), 1)[:, None]) / 2**0.5
    hidden = torch.tanh(model[0](x)).detach()  # type: ignore[operator]
    h = torch.cat([hidden, torch.ones(31, 1, dtype=torch.float64)], 1)
    information = errbar.collect(model, [x], last_layers=1, fisher="sampled", structure="kron", draws=2)
    (block,) = information.total.blocks
    torch.testing.assert_close(block.inner, h.T @ h)
    torch.testing.assert_close(block.outer, scores.flatten(0, 1).T @ scores.flatten(0, 1))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_mean_over_many_draws_is_ggn(name: str) -> None:
    model, x = network_called(name), inputs(8)
    draws = 4000
    exact = errbar.collect(model, [x], parameters="all", fisher="ggn").dense()
    sampled = fitted(model, x, structure="dense", draws=draws).dense()
    rows, _ = scores_by_autograd(model, x, 50, seed=1)
    fourth = (rows.square().T @ rows.square()) / 50
    # Five standard deviations of a mean of products of scores.
    assert bool(((sampled - exact).abs() <= 5 * (fourth / draws).sqrt() + 1e-12).all())


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_forgotten_is_what_went_in(name: str, structure: str) -> None:
    model, x = network_called(name), inputs(40)
    half = fitted(model, x[20:], structure=structure)
    whole = fitted(model, x, structure=structure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        posterior = errbar.condition(whole, errbar.Prior(1.0)).forget([x[:20].flip(0)])
    torch.testing.assert_close(posterior.information.dense(), half.total.dense(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_batches_and_order_do_not_matter(structure: str) -> None:
    model, x = network_called("convolutional"), inputs(30)
    whole = fitted(model, x, structure=structure, rank=60)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        parts = errbar.collect(
            model, x[order].split(7), parameters="all", fisher="sampled", structure=structure, rank=60
        )
    torch.testing.assert_close(parts.dense(), whole.total.dense(), rtol=1e-8, atol=1e-9)


def test_draws_follow_from_the_sample_alone() -> None:
    x = inputs(50).float()
    keys = sample_keys(Batch((x,)))
    assert len(set(keys.tolist())) == 50
    assert torch.equal(sample_keys(Batch((x[7:8],))), keys[7:8])
    assert torch.equal(sample_keys(Batch((x.double(),))), keys)
    assert torch.equal(sample_keys(Batch((torch.cat([x, torch.zeros(50, 3)], 1),))), keys)


def test_padding_behind_a_mask_changes_no_key() -> None:
    tokens = torch.randint(1, 99, (20, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    longer = torch.cat([tokens, torch.full((20, 4), 7)], 1)
    longer_mask = torch.cat([mask, torch.zeros(20, 4, dtype=torch.int64)], 1)
    short = sample_keys(Batch((), {"input_ids": tokens, "attention_mask": mask}))
    assert torch.equal(sample_keys(Batch((), {"input_ids": longer, "attention_mask": longer_mask})), short)
    assert len(set(short.tolist())) == 20


class Sequences(nn.Module):
    """The mean over the tokens that a mask keeps, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask[:, :, None].double()
        logits: Tensor = self.head((torch.tanh(self.words(input_ids)) * weights).sum(1) / weights.sum(1))
        return logits


@pytest.mark.parametrize("size", [1, 4, 12])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_draw(side: str, size: int) -> None:
    torch.manual_seed(0)
    model = Sequences().double().eval()
    sequences = [torch.randint(1, 30, (length,)) for length in (2, 5, 3, 7, 4, 4, 6, 2, 3, 5, 8, 3)]

    def padded(some: list[Tensor]) -> dict[str, Tensor]:
        lengths = [len(sequence) for sequence in some]
        ids, mask = torch.full((2, len(some), max(lengths) + 1), 9).unbind()
        mask.zero_()
        for row, sequence in enumerate(some):
            where = slice(-len(sequence), None) if side == "left" else slice(len(sequence))
            ids[row, where], mask[row, where] = sequence, 1
        return {"input_ids": ids, "attention_mask": mask}

    alone = [{"input_ids": one[None], "attention_mask": torch.ones(1, len(one))} for one in sequences]
    expected = errbar.collect(model, alone, parameters="all", fisher="sampled")
    batches = [padded(sequences[start : start + size]) for start in range(0, 12, size)]
    measured = errbar.collect(model, batches, parameters="all", fisher="sampled")
    torch.testing.assert_close(measured.dense(), expected.dense(), rtol=1e-8, atol=1e-12)


def test_uniform_numbers_are_uniform_and_differ_by_seed_and_draw() -> None:
    keys = sample_keys(Batch((torch.arange(20_000)[:, None],)))
    first = uniforms(keys, 0, 2)
    assert float(first.min()) >= 0
    assert float(first.max()) < 1
    counts = torch.histc(first[:, 0], 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 44  # χ² with 19 degrees of freedom, 0.1 %
    between = torch.corrcoef(torch.stack([first[:, 0], first[:, 1], uniforms(keys, 1, 1)[:, 0]]))
    assert float((between - torch.eye(3, dtype=torch.float64)).abs().max()) < 0.03


def test_files_and_sums_keep_draws_and_seed(tmp_path: object) -> None:
    model, x = network_called("mlp"), inputs(12)
    information = fitted(model, x, draws=2, seed=9)
    path = f"{tmp_path}/information.safetensors"
    information.save(path)
    loaded = errbar.merge([path]).with_model(model)
    torch.testing.assert_close((information + loaded).dense(), 2 * information.total.dense())
    updated = errbar.condition(loaded, errbar.Prior(1.0)).update([inputs(4, seed=8)])
    expected = fitted(model, torch.cat([x, inputs(4, seed=8)]), draws=2, seed=9)
    torch.testing.assert_close(updated.information.dense(), expected.total.dense(), rtol=1e-8, atol=1e-9)
    with pytest.raises(errbar.MismatchError, match="different draws and seed"):
        information + fitted(model, x, draws=2, seed=8)
    with pytest.raises(errbar.MismatchError, match="different fisher"):
        information + fitted(model, x, fisher="ggn")


@pytest.mark.parametrize("draws", [0, -1, 1.5, "many"])
def test_draws_are_whole_and_positive(draws: object) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"draws is .*; expected a whole number of one or more"):
        fitted(network_called("mlp"), inputs(3), draws=draws)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_samples_that_repeat_are_told_of_once(structure: str, tmp_path: Path) -> None:
    """Two of 100 are copies, in other batches and parts than the first."""
    model, x = network_called("mlp"), inputs(100)
    x[70], x[99] = x[3], x[3]
    sentence = r"^2 of 100 samples repeat others \(2%\), and samples that are equal have equal draws"
    for options in ({}, {"checkpoint": tmp_path / "it", "every": 1}):
        with pytest.warns(errbar.DataWarning, match=sentence) as told:
            errbar.collect(
                model,
                list(x.split(30)),
                parameters="all",
                fisher="sampled",
                structure=structure,
                **options,  # type: ignore[arg-type]
            )
        assert len(told) == 1


def test_few_repeats_are_not_told_of_and_other_fishers_draw_nothing() -> None:
    model, x = network_called("mlp"), inputs(100)
    x[70] = x[3]
    # A warning would be an error here.
    information = errbar.collect(model, [x], parameters="all", fisher="sampled")
    assert information.task.scores is not None
    assert information.task.scores.repeats is None
    errbar.collect(model, [x[:1].repeat(10, 1)], parameters="all")


def test_repeats_are_counted_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("errbar._curvature.scores._COUNTED_SAMPLES", 60)
    model, x = network_called("mlp"), inputs(90)
    x[89] = x[88]
    errbar.collect(model, list(x.split(30)), parameters="all", fisher="sampled")
    x[59] = x[58]
    with pytest.warns(errbar.DataWarning, match=r"^1 of 60 samples repeat others \(2%\)"):
        errbar.collect(model, list(x.split(30)), parameters="all", fisher="sampled")
