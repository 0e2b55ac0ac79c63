"""Tokens and pixels: every position is classified, and the information is Σ_n Σ_t JᵀΛJ.

The oracle differentiates one position and class at a time by autograd.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import errbar
from errbar._curvature.positions import Positions, PositionScores
from errbar._model.batch import Batch

STRUCTURES = ["dense", "block", "kron", "diag", "lowrank"]
TOKENS, CLASSES = 5, 4


class Tagger(nn.Module):
    """Tokens whose logits depend on their neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6, padding_idx=0)
        self.mix = nn.Conv1d(6, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(x)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        logits: Tensor = self.head(self.norm(torch.tanh(self.mix(hidden.mT).mT)))
        return logits


class Segmenter(nn.Module):
    """Pixels; logits as convolutions return them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
        self.head = nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def tagger() -> nn.Module:
    torch.manual_seed(0)
    return Tagger().double()


def segmenter() -> nn.Module:
    torch.manual_seed(1)
    return Segmenter().double()


def sentences(count: int = 8, *, seed: int = 0, ignored: bool = True) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 20, (count, TOKENS), generator=generator)
    with torch.no_grad():
        pmf = torch.softmax(3 * tagger()(x), 2)
    y = torch.multinomial(pmf.flatten(0, 1), 1, generator=generator).reshape(count, TOKENS)
    if ignored:
        y[:, -1], y[0, :2] = -100, -100
    return x, y


def pictures(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(count, 1, 3, 4, generator=generator, dtype=torch.float64)
    with torch.no_grad():
        pmf = torch.softmax(3 * segmenter()(x).movedim(1, -1), -1)
    return x, torch.multinomial(pmf.flatten(0, 2), 1, generator=generator).reshape(count, 3, 4)


def jacobian(model: nn.Module, names: tuple[str, ...], x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (S, M) and their derivative (S, M, n) of one input, classes last."""
    values = {name: value.detach() for name, value in model.named_parameters() if name in names}

    def logits(given: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(model.eval(), given, (x[None],))[0]
        return (result.movedim(0, -1) if result.ndim == 3 else result).flatten(0, -2)

    parts = jacrev(logits)(values)
    return logits(values).detach(), torch.cat([parts[name].flatten(2) for name in values], 2)


def information(model: nn.Module, names: tuple[str, ...], x: Tensor, y: Tensor | None, fisher: str = "ggn") -> Tensor:
    total = torch.zeros(())
    for n in range(len(x)):
        logits, J = jacobian(model, names, x[n])
        for t in range(len(logits)):
            if y is not None and y[n].flatten()[t] < 0:
                continue
            f = torch.softmax(logits[t], 0)
            weights = torch.diag(f) - torch.outer(f, f) if fisher == "ggn" else torch.diag(f * (1 - f))
            total = total + J[t].T @ weights @ J[t]
    return total


@pytest.mark.parametrize("fisher", ["ggn", "eta"])
@pytest.mark.parametrize("kind", ["tokens", "pixels"])
def test_the_information_of_the_last_layer_is_that_of_every_position_by_itself(kind: str, fisher: str) -> None:
    model, (x, y) = (tagger(), sentences()) if kind == "tokens" else (segmenter(), pictures())
    posterior = errbar.fit(model, [(x[:3], y[:3]), (x[3:], y[3:])], last_layers=1, outputs="positions", fisher=fisher)
    truth = information(model, posterior.information.parameter_names, x, y, fisher)
    assert torch.allclose(posterior.information.dense(), truth, rtol=1e-8, atol=1e-12)
    _, J = jacobian(model, posterior.information.parameter_names, x[1])
    expected = J @ posterior.covariance() @ J.mT
    logits = posterior.logits(x[:2])
    assert torch.allclose(logits.covariance[1].flatten(0, -3), expected, rtol=1e-8)
    assert logits.mean.shape == (2, *y.shape[1:], CLASSES if kind == "tokens" else 3)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("fisher", ["ggn", "eta", "sampled"])
def test_positions_of_the_last_layer_are_inputs_of_a_linear_classifier(structure: str, fisher: str) -> None:
    model, (x, y) = tagger(), sentences()
    posterior = errbar.fit(model, [(x, y)], last_layers=1, outputs="positions", structure=structure, fisher=fisher)
    head = model.get_submodule("head")
    with torch.no_grad():
        hidden = model.norm(torch.tanh(model.mix(model.embedding(x).mT).mT))  # type: ignore[operator, union-attr]
    keep = y >= 0
    if fisher == "sampled":
        # Draws belong to positions, so those of other inputs differ: only the expectation is the same.
        assert posterior.information.dense().trace() > 0
        return
    plain = errbar.fit(head, [(hidden[keep], y[keep])], last_layers=1, structure=structure, fisher=fisher)
    assert torch.allclose(posterior.information.dense(), plain.information.dense(), rtol=1e-8, atol=1e-10)
    assert posterior.information.log_likelihood == pytest.approx(plain.information.log_likelihood, abs=1e-9)
    prediction, expected = posterior.predict(x[:2], 200), plain.predict(hidden[:2].flatten(0, 1), 200)
    for name in ("pmf", "std", "entropy", "mutual_information", "confidence"):
        value, truth = getattr(prediction, name), getattr(expected, name)
        assert value.shape[:2] == (2, TOKENS)
        assert torch.allclose(value.flatten(0, 1), truth, atol=1e-9), name


@pytest.mark.parametrize("structure", STRUCTURES)
def test_scores_of_all_positions_together_are_those_of_one_draw_at_a_time(structure: str) -> None:
    model, (x, y) = tagger(), sentences()
    # `kron` says that it treats an embedding as `diag` does.
    chosen = ["mix", "norm", "head"]
    names = tuple(name for name, _ in model.named_parameters() if name.split(".")[0] in chosen)
    posterior = errbar.fit(
        model, [(x, y)], parameters=chosen, outputs="positions", fisher="sampled", draws=2, seed=3, structure=structure
    )
    scores = PositionScores(2, 3, classes=CLASSES, positions=Positions(None, seed=3))
    with torch.no_grad():
        combined = scores(Batch((x,), labels=y), model(x).flatten(1))
    rows = []
    for n in range(len(x)):
        _, J = jacobian(model, names, x[n])
        rows += [combined[k, n] @ J.flatten(0, 1) for k in range(2)]
    truth = torch.stack(rows).T @ torch.stack(rows)
    result = posterior.information.dense()
    if structure == "diag":
        assert torch.allclose(result.diagonal(), truth.diagonal(), rtol=1e-7, atol=1e-10)
    elif structure == "dense":
        assert torch.allclose(result, truth, rtol=1e-8, atol=1e-10)
    elif structure == "block":
        sizes = {name: value.numel() for name, value in model.named_parameters() if name in names}
        start = sum(size for name, size in sizes.items() if not name.startswith("head"))
        assert torch.allclose(result[start:, start:], truth[start:, start:], rtol=1e-8, atol=1e-10)
    else:
        assert result.trace() > 0


@pytest.mark.filterwarnings("ignore::errbar.errors.CostNotice")
def test_drawn_labels_have_the_complete_information_as_their_mean() -> None:
    model, (x, y) = tagger(), sentences()
    names = ("norm.weight", "norm.bias")
    truth = information(model, names, x, y)
    draws = 1000
    drawn = errbar.collect(
        model, [(x, y)], parameters=["norm"], outputs="positions", fisher="sampled", draws=draws
    ).dense()
    scale = torch.outer(truth.diagonal(), truth.diagonal()).sqrt()
    # The fourth moment of a score is a few times the square of its second, and n samples average.
    assert float(((drawn - truth).abs() / scale).max().detach()) < 6 * 2 / math.sqrt(draws)


def test_a_share_of_the_positions_has_the_same_mean_and_can_be_forgotten() -> None:
    model, (x, y) = tagger(), sentences(40, ignored=False)
    whole = errbar.collect(model, [(x, y)], last_layers=1, outputs="positions").dense()
    seeds = range(30)
    parts = [errbar.collect(model, [(x, y)], last_layers=1, outputs="positions", positions=0.25, seed=s) for s in seeds]
    mean = torch.stack([part.dense().diagonal() for part in parts])
    error = mean.std(0) / math.sqrt(len(seeds))
    assert bool(((mean.mean(0) - whole.diagonal()).abs() < 5 * error + 1e-9).all())
    assert bool((mean.std(0) > 0).all())
    posterior = errbar.condition(parts[0], errbar.Prior(1.0)).forget([(x[10:], y[10:])])
    rest = errbar.collect(model, [(x[:10], y[:10])], last_layers=1, outputs="positions", positions=0.25)
    assert torch.allclose(posterior.information.dense(), rest.dense(), atol=1e-8)


@pytest.mark.parametrize(("parameters", "fisher"), [(["head"], "ggn"), ("vectors", "sampled")])
def test_batches_order_and_padding_do_not_matter(parameters: list[str] | str, fisher: str) -> None:
    model, (x, y) = tagger(), sentences()
    options = {"parameters": parameters, "outputs": "positions", "fisher": fisher}
    whole = errbar.collect(model, [(x, y)], **options).dense()  # type: ignore[arg-type]
    order = torch.tensor([3, 1, 0, 7, 6, 2, 4, 5])
    parts = [(x[rows], y[rows]) for rows in order.split(3)]
    assert torch.allclose(errbar.collect(model, parts, **options).dense(), whole, atol=1e-10)  # type: ignore[arg-type]
    padded = torch.cat([x, torch.zeros(len(x), 2, dtype=torch.long)], 1)
    more = torch.cat([y, torch.full((len(x), 2), -100)], 1)
    batch = {"x": padded, "attention_mask": (padded > 0).long(), "labels": more}
    plain = {"x": x, "attention_mask": (x > 0).long(), "labels": y}
    ends = [errbar.collect(model, [one], **options).dense() for one in (batch, plain)]  # type: ignore[arg-type]
    assert torch.allclose(*ends, atol=1e-10)


def test_without_labels_a_mask_alone_leaves_positions_out() -> None:
    model, (x, _) = tagger(), sentences()
    mask = torch.ones_like(x)
    mask[:, 3:] = 0
    masked = errbar.collect(model, [{"x": x, "attention_mask": mask}], last_layers=1, outputs="positions")
    every = errbar.collect(model, [x], last_layers=1, outputs="positions")
    assert 0 < masked.dense().trace() < every.dense().trace()
    assert masked.log_likelihood is None


def test_one_position_is_the_plain_classifier() -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(3, 6), nn.Linear(6, CLASSES)
    plain = nn.Sequential(body, nn.Tanh(), head).double()

    class OneToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.plain(x)
            return logits

    x = torch.randn(9, 1, 3, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (9, 1))
    one = errbar.fit(OneToken(), [(x, y)], last_layers=1, outputs="positions")
    other = errbar.fit(plain, [(x[:, 0], y[:, 0])], last_layers=1)
    assert torch.allclose(one.information.dense(), other.information.dense(), atol=1e-10)
    assert torch.allclose(one.predict(x).pmf[:, 0], other.predict(x[:, 0]).pmf, atol=1e-9)


def test_draws_behind_the_last_layer_have_the_moments_of_the_linearised_logits() -> None:
    model, (x, y) = tagger(), sentences()
    names = ("norm.weight", "norm.bias", "head.weight", "head.bias")
    posterior = errbar.fit(model, [(x, y)], parameters=["norm", "head"], outputs="positions", fisher="sampled")
    draws = 2000
    logits = posterior.position_logits(x[:2], draws)
    assert logits.mean.shape == (2, TOKENS, CLASSES)
    P = posterior.covariance()
    for n in range(2):
        _, J = jacobian(model, names, x[n])
        truth = J @ P @ J.mT
        scale = (truth.diagonal(dim1=1, dim2=2)[:, :, None] * truth.diagonal(dim1=1, dim2=2)[:, None]).sqrt()
        assert float(((logits.covariance[n] - truth).abs() / scale).max().detach()) < 6 / math.sqrt(draws)
    whole = posterior.predict_by_parameters(x[:2], 50)
    assert whole.pmf.shape == (2, TOKENS, CLASSES)


@pytest.mark.parametrize(("kind", "parameters"), [("tokens", ["head"]), ("pixels", ["head"]), ("tokens", "vectors")])
def test_files_keep_how_positions_count(kind: str, parameters: list[str] | str, tmp_path: object) -> None:
    model, (x, y) = (tagger(), sentences()) if kind == "tokens" else (segmenter(), pictures())
    fisher = "sampled" if parameters == "vectors" else "ggn"
    posterior = errbar.fit(model, [(x, y)], parameters=parameters, outputs="positions", fisher=fisher)
    calibrated = errbar.calibrate(posterior, [(x, y)])
    path = f"{tmp_path}/posterior.safetensors"
    calibrated.save(path)
    loaded = errbar.load(path, model)
    assert torch.allclose(loaded.predict(x, 50).pmf, calibrated.predict(x, 50).pmf, atol=1e-9)
    assert torch.allclose(
        loaded.update([(x[:2], y[:2])]).information.dense(), posterior.update([(x[:2], y[:2])]).information.dense()
    )
    drawn = loaded.sample_parameters(3)
    shapes = dict(model.named_parameters())
    assert all(value.shape == (3, *shapes[name].shape) for name, value in drawn.items())


def test_covariances_of_all_positions_are_never_held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from errbar._curvature.dense import DenseFactor

    sizes: list[int] = []
    original = DenseFactor.gaussian

    def counting(self: DenseFactor, mean: Tensor, derivative: object) -> object:
        sizes.append(len(mean))
        return original(self, mean, derivative)  # type: ignore[arg-type]

    model = segmenter().float()
    x = torch.randn(2, 1, 64, 64)
    posterior = errbar.fit(model, [x], last_layers=1, outputs="positions")
    monkeypatch.setattr(DenseFactor, "gaussian", counting)
    prediction = posterior.predict(x, 100)
    assert prediction.pmf.shape == (2, 64, 64, 3)
    assert sum(sizes) == 2 * 64 * 64
    assert max(sizes) <= 4096
    assert torch.allclose(prediction.pmf.sum(-1), torch.ones(2, 64, 64), atol=1e-5)
    # So few are kept for the next statistic; of more, only those of the last rows.
    expected = prediction.std, prediction.mutual_information
    assert sum(sizes) == 2 * 64 * 64
    monkeypatch.setattr("errbar._distributions.positions._KEPT_BYTES", 0)
    again = posterior.predict(x, 100)
    assert torch.equal(again.std, expected[0])
    assert torch.equal(again.mutual_information, expected[1])
    assert sum(sizes) == 4 * 2 * 64 * 64


def test_the_calibration_of_positions_does_not_depend_on_their_order() -> None:
    model, (x, y) = tagger(), sentences(60)
    posterior = errbar.fit(model, [(x, y)], last_layers=1, outputs="positions")
    held_x, held_y = sentences(60, seed=5)
    one = errbar.calibrate(posterior, [(held_x, held_y)], samples=100)
    other = errbar.calibrate(posterior, [(held_x[30:], held_y[30:]), (held_x[:30], held_y[:30])], samples=100)
    assert one.temperature == pytest.approx(other.temperature, rel=1e-3)


def test_mistakes_are_told() -> None:
    model, (x, y) = tagger(), sentences()
    fit = errbar.fit
    with pytest.raises(errbar.errors.ArgumentError, match="fisher='sampled'"):
        fit(model, [(x, y)], parameters="all", outputs="positions")
    with pytest.raises(errbar.errors.LabelError, match=r"Labels have shape \(8, 4\); expected \(8, 5\)"):
        fit(model, [(x, y[:, :4])], last_layers=1, outputs="positions")
    with pytest.raises(errbar.errors.LabelError, match="Labels run from"):
        fit(model, [(x, y + 9)], last_layers=1, outputs="positions")
    with pytest.raises(errbar.errors.LabelError, match="No position of the data counts"):
        fit(model, [(x, torch.full_like(y, -100))], last_layers=1, outputs="positions")
    with pytest.raises(errbar.errors.ArgumentError, match=r"positions is 0; expected the share"):
        fit(model, [(x, y)], last_layers=1, outputs="positions", positions=0)
    with pytest.raises(errbar.errors.ArgumentError, match="for outputs='positions'"):
        fit(nn.Linear(2, 3), [torch.randn(4, 2)], last_layers=1, positions=0.5)
    with pytest.raises(errbar.errors.ModelError, match=r"with outputs='positions' expected"):
        fit(nn.Linear(2, 3), [torch.randn(4, 2)], last_layers=1, outputs="positions")
    posterior = fit(model, [(x, y)], last_layers=1, outputs="positions")
    with pytest.raises(errbar.errors.ArgumentError, match="fitted with outputs='positions'"):
        posterior.joint_logits(x)
    with pytest.raises(errbar.errors.ArgumentError, match="Predict batch by batch"):
        posterior.predict(iter([x]))
    with pytest.raises(errbar.errors.LabelError, match="Labels are missing"):
        errbar.calibrate(posterior, [x])
    with pytest.raises(errbar.errors.DataError, match="in which a position has a label other than -100"):
        errbar.calibrate(posterior, [(x, torch.full_like(y, -100))])
    with pytest.raises(errbar.errors.LabelError, match="pass ignore_index= to the fit"):
        fit(model, [(x, torch.full_like(y, 255))], last_layers=1, outputs="positions")
    with pytest.raises(errbar.errors.ArgumentError, match="top= is for one PMF of each input"):
        posterior.logits(x, top=2)
    for outputs in ("classes", "labels"):
        with pytest.raises(errbar.errors.ModelError, match="for a class of every token or pixel, pass outputs='posi"):
            fit(model, [x], last_layers=1, outputs=outputs)


def test_a_transformer_for_tokens_works_as_it_is() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    torch.manual_seed(0)
    model = transformers.BertForTokenClassification(config).double()
    ids = torch.randint(1, 30, (6, 5))
    mask = torch.ones_like(ids)
    mask[0, 3:] = 0
    labels = torch.randint(0, 3, (6, 5))
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    posterior = errbar.fit(model, [batch], last_layers=1, outputs="positions")
    assert posterior.predict({"input_ids": ids, "attention_mask": mask}).pmf.shape == (6, 5, 3)
    deeper = errbar.fit(model, [batch], parameters="vectors", outputs="positions", fisher="sampled", structure="diag")
    assert deeper.predict({"input_ids": ids, "attention_mask": mask}, 20).pmf.shape == (6, 5, 3)


@pytest.mark.parametrize(("parameters", "fisher"), [(["head"], "ggn"), ("all", "sampled")])
def test_batches_and_parts_without_labels_add_nothing(parameters: list[str] | str, fisher: str, tmp_path: Path) -> None:
    model, (x, y) = tagger(), sentences()
    none = torch.full_like(y, -100)
    options = {"parameters": parameters, "fisher": fisher, "outputs": "positions"}
    expected = errbar.collect(model, [(x, y)], **options)  # type: ignore[arg-type]
    together = errbar.collect(model, [(x.flip(1), none), (x, y)], **options)  # type: ignore[arg-type]
    assert torch.allclose(together.dense(), expected.dense(), atol=1e-10)
    file = tmp_path / "part"
    in_parts = errbar.collect(model, [(x.flip(1), none), (x, y)], checkpoint=file, every=1, **options)  # type: ignore[arg-type]
    assert torch.allclose(in_parts.dense(), expected.dense(), atol=1e-10)


def test_actions_are_chosen_for_every_position() -> None:
    model, x = segmenter(), torch.randn(4, 1, 5, 7, dtype=torch.float64)
    posterior = errbar.fit(model, [x], last_layers=1, outputs="positions")
    prediction = posterior.predict(x, 100)
    cost = torch.tensor([[0.0, 1.0, 4.0], [1.0, 0.0, 2.0]], dtype=torch.float64)
    decision = errbar.decide(prediction, cost)
    alone = errbar.decide(prediction.flat, cost)  # type: ignore[attr-defined]
    assert decision.action.shape == decision.least_loss_std.shape == (4, 5, 7)
    assert torch.equal(decision.expected_loss.reshape(-1, 2), alone.expected_loss)
    assert torch.equal(decision.std.reshape(-1, 2), alone.std)


def test_a_fit_is_not_refused_for_the_draws_of_a_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = segmenter().float(), torch.randn(6, 1, 64, 64)
    # 6 · 64 · 64 · 3 logits with 1000 draws, and once more, would be 562 MiB beside the draws of the parameters.
    monkeypatch.setattr("errbar._base.memory.available_bytes", lambda device: 2**30)
    for structure in ("dense", "auto"):
        posterior = errbar.fit(
            model, [x], parameters="vectors", fisher="sampled", structure=structure, outputs="positions"
        )
        assert posterior.information.structure == "dense"
    with pytest.raises(errbar.SizeError, match="Predict fewer inputs at a time"):
        posterior.predict(x.repeat(2, 1, 1, 1), 1000)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize(("parameters", "fisher"), [(["head"], "ggn"), (["head"], "sampled"), ("all", "sampled")])
def test_class_weights_count_each_position_by_its_label(
    parameters: list[str] | str, fisher: str, share: float, tmp_path: Path
) -> None:
    model, (x, y) = tagger(), sentences()
    weights = [0.5, 2.0, 0.0, 3.0]
    options = {"parameters": parameters, "fisher": fisher, "outputs": "positions", "positions": share}
    posterior = errbar.fit(model, [(x, y)], class_weights=weights, **options)  # type: ignore[arg-type]
    information = posterior.information
    if parameters == ["head"]:
        # Of the last layer positions are inputs of their own, so each class can be taken alone.
        alone = [errbar.collect(model, [(x, y.where(y == m, -100))], **options) for m in range(CLASSES)]  # type: ignore[arg-type]
        expected = sum(w * one.dense() for w, one in zip(weights, alone, strict=True))
        likelihood = sum(w * one.log_likelihood for w, one in zip(weights, alone, strict=True))  # type: ignore[operator]
        assert torch.allclose(information.dense(), expected, atol=1e-10)  # type: ignore[arg-type]
        assert information.log_likelihood == pytest.approx(likelihood)
    else:
        equal = errbar.collect(model, [(x, y)], class_weights=[4.0] * CLASSES, **options)  # type: ignore[arg-type]
        plain = errbar.collect(model, [(x, y)], **options)  # type: ignore[arg-type]
        assert torch.allclose(equal.dense(), 4 * plain.dense(), atol=1e-10)
        without = errbar.collect(model, [(x, y.where(y == 1, -100))], **options)  # type: ignore[arg-type]
        only = errbar.collect(model, [(x, y)], class_weights=[0.0, 1.0, 0.0, 0.0], **options)  # type: ignore[arg-type]
        assert torch.allclose(only.dense(), without.dense(), atol=1e-10)
    posterior.save(str(tmp_path / "file"))
    loaded = errbar.load(str(tmp_path / "file"), model)
    assert isinstance(loaded, errbar.Posterior)
    there_and_back = loaded.update([(x.flip(1), y)]).forget([(x.flip(1), y)])
    assert torch.allclose(there_and_back.information.dense(), information.dense(), atol=1e-9)
    with pytest.raises(errbar.LabelError, match="a batch has no labels"):
        posterior.update([x])


def test_positions_are_fused_as_inputs_of_their_own() -> None:
    model, x = segmenter(), torch.randn(2, 1, 4, 3, dtype=torch.float64)
    posterior = errbar.fit(model, [x], last_layers=1, outputs="positions")
    gaussian: Any = posterior.logits(x)
    with pytest.raises(errbar.errors.ArgumentError, match=r"Item 0 to fuse has a Gaussian for each position.*rows\(\)"):
        errbar.fuse([gaussian, gaussian])
    fused = errbar.fuse([gaussian.rows(), gaussian.rows()])
    assert torch.allclose(fused.mean, gaussian.rows().centered().mean)
    assert torch.allclose(fused.covariance, gaussian.rows().centered().covariance / 2)


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")  # random labels
def test_calibration_counts_all_positions_alike() -> None:
    model, (x, y) = tagger(), sentences(30)
    posterior = errbar.fit(model, [(x, y)], last_layers=1, outputs="positions")
    plain = errbar.calibrate(posterior, [{"x": x, "labels": y}], fit=("temperature",), samples=50)
    weights = [float(n) for n in range(len(x))]
    weighted = errbar.calibrate(
        posterior, [{"x": x, "labels": y, "weights": weights}], fit=("temperature",), samples=50
    )
    assert weighted.temperature == plain.temperature
