"""`errbar.acquire`: against a search that refits the covariance after every choice, and what may not change it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import errbar
from data import draw
from errbar._deciding import acquire as module
from errbar.errors import DataError
from networks import mlp, seeded

POOL, CHOSEN = 60, 8


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 6),
        nn.Softplus(),
        nn.Linear(6, 4),
    )


def one_label() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


FITS: list[tuple[Callable[[], nn.Module], int, dict[str, Any]]] = [
    (convolutional, 16, {"last_layers": 1}),
    (convolutional, 16, {"last_layers": 1, "fisher": "eta"}),
    (convolutional, 16, {"last_layers": 1, "structure": "kron"}),
    (convolutional, 16, {"parameters": "all"}),
    (convolutional, 16, {"parameters": "all", "structure": "block"}),
    (convolutional, 16, {"parameters": "all", "structure": "kron"}),
    (convolutional, 16, {"parameters": "all", "structure": "diag"}),
    (convolutional, 16, {"parameters": "all", "structure": "lowrank", "rank": 10}),
    (convolutional, 16, {"parameters": "all", "structure": {"8": "dense", "*": "kron"}}),
    (convolutional, 16, {"parameters": "all", "fisher": "sampled"}),
    (mlp, 5, {"last_layers": 2}),
    (convolutional, 16, {"last_layers": 1, "outputs": "labels"}),
    (convolutional, 16, {"parameters": "all", "outputs": "labels"}),
    (convolutional, 16, {"parameters": "all", "structure": "kron", "outputs": "labels"}),
    (one_label, 5, {"last_layers": 1, "outputs": "labels"}),
]


def _fitted(make: Callable[[], nn.Module], inputs: int, **options: Any) -> errbar.Posterior:
    return errbar.fit(seeded(make), [draw(30, inputs)], prior=errbar.Prior(0.5), **options)


def _information(posterior: errbar.Posterior, x: Tensor) -> Tensor:
    """JᵀΛJ of each input, by automatic differentiation of the whole model."""
    model, names = posterior.model, posterior.information.parameter_names
    every = {name: value.detach() for name, value in model.named_parameters()}

    def logits(values: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, {**every, **values}, (one[None],))[0]  # type: ignore[no-any-return]

    parts = vmap(jacrev(logits), (None, 0))({name: every[name] for name in names}, x)
    jacobian = torch.cat([parts[name].flatten(2) for name in names], 2)
    g = model(x).detach()
    if posterior.information.outputs == "labels":
        weights = torch.diag_embed(torch.sigmoid(g) * torch.sigmoid(-g))
        return jacobian.mT @ weights @ jacobian
    f = torch.softmax(g, 1)
    weights = torch.diag_embed(f) - f[:, :, None] * f[:, None, :]
    if posterior.information.fisher == "eta":
        weights = torch.diag_embed(weights.diagonal(dim1=1, dim2=2))
    return jacobian.mT @ weights @ jacobian


def _brute_force(posterior: errbar.Posterior, x: Tensor, k: int) -> list[int]:
    """½ (ln det(P⁻¹ + JᵀΛJ) − ln det P⁻¹) of every input, and P⁻¹ anew after every choice."""
    precision, information = torch.linalg.inv(posterior.covariance()), _information(posterior, x)
    chosen: list[int] = []
    for _ in range(k):
        gains = torch.linalg.slogdet(precision + information)[1]
        gains[chosen] = -torch.inf
        chosen.append(int(gains.argmax()))
        precision = precision + information[chosen[-1]]
    return chosen


@pytest.mark.parametrize(("make", "inputs", "options"), FITS)
def test_the_choice_is_that_of_refitting_after_every_choice(
    make: Callable[[], nn.Module], inputs: int, options: dict[str, Any]
) -> None:
    posterior, pool = _fitted(make, inputs, **options), 2 * draw(POOL, inputs, seed=7)
    chosen = errbar.acquire(posterior, [pool[:13], pool[13:]], CHOSEN)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == _brute_force(posterior, pool, CHOSEN)


def test_updates_one_by_one_choose_the_same() -> None:
    posterior, pool = _fitted(mlp, 5, last_layers=2), 2 * draw(POOL, 5, seed=7)
    chosen = errbar.acquire(posterior, [pool], 4).tolist()
    one_by_one: list[int] = []
    for _ in range(4):
        best = int(errbar.acquire(posterior, [pool], 1))
        one_by_one.append(best)
        posterior = posterior.update([pool[best : best + 1]])
    assert chosen == one_by_one


def test_copies_of_one_doubt_are_not_chosen_together() -> None:
    posterior = _fitted(mlp, 5, last_layers=1)
    doubtful = errbar.rank_outliers(posterior, [5 * draw(40, 5, seed=3)], by="mutual_information")[0]
    one = 5 * draw(40, 5, seed=3)[doubtful : doubtful + 1]
    pool = torch.cat([one.expand(5, 5), 3 * draw(20, 5, seed=4)])
    by_themselves = errbar.acquire(posterior, [pool], 5, by="mutual_information")
    together = errbar.acquire(posterior, [pool], 5)
    assert sum(index < 5 for index in by_themselves.tolist()) == 5
    assert sum(index < 5 for index in together.tolist()) < 5


def test_few_held_inputs_and_few_at_a_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    posterior, pool = _fitted(mlp, 5, last_layers=2), 2 * draw(POOL, 5, seed=7)
    expected = errbar.acquire(posterior, [pool], 20).tolist()
    monkeypatch.setattr(module, "_HELD_INPUTS", 3)
    monkeypatch.setattr(module, "_FIRST_TOGETHER", 2)
    assert errbar.acquire(posterior, [pool[:7], pool[7:50], pool[50:]], 20).tolist() == expected


def test_all_of_the_pool_and_every_form_of_data() -> None:
    posterior, pool = _fitted(mlp, 5, last_layers=1), 2 * draw(12, 5, seed=7)
    expected = errbar.acquire(posterior, [pool], 12).tolist()
    assert sorted(expected) == list(range(12))
    data = TensorDataset(pool, torch.zeros(12, dtype=torch.long))

    def one_by_one() -> Iterator[Tensor]:
        yield from pool.split(1)

    shuffled = DataLoader(data, batch_size=5, shuffle=True, generator=torch.Generator().manual_seed(3))
    batched = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 5, drop_last=False))
    one_at_a_time = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 1, drop_last=False))
    subset = DataLoader(Subset(data, range(12)), batch_size=5, shuffle=True)
    for form in (data, DataLoader(data, batch_size=5), shuffled, batched, one_at_a_time, subset, one_by_one()):
        assert errbar.acquire(posterior, form, 12).tolist() == expected


class _ByLength(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        yield from ([3, 1], [0, 2])


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": WeightedRandomSampler([1.0] * 12, 12)},
        {"sampler": RandomSampler(range(12), num_samples=6)},
        {"sampler": RandomSampler(range(12), replacement=True)},
        {"sampler": RandomSampler(range(6))},
        {"batch_sampler": BatchSampler(WeightedRandomSampler([1.0] * 12, 12), 3, drop_last=False)},
        {"batch_sampler": _ByLength()},
    ],
)
@pytest.mark.parametrize("by", ["information", "random"])
def test_an_order_that_is_not_that_of_the_data_is_refused(options: dict[str, Any], by: str) -> None:
    posterior, data = _fitted(mlp, 5, last_layers=1), TensorDataset(draw(12, 5))
    with pytest.raises(DataError, match="Pass the data set itself, or torch"):
        errbar.acquire(posterior, DataLoader(data, **options), 3, by=by)


def test_a_random_subset_is_to_be_passed_as_a_data_set() -> None:
    posterior, data = _fitted(mlp, 5, last_layers=1), TensorDataset(draw(12, 5))
    with pytest.raises(
        DataError, match=r"SubsetRandomSampler.*Pass torch.utils.data.Subset\(dataset, indices\) instead"
    ):
        errbar.acquire(posterior, DataLoader(data, sampler=SubsetRandomSampler(range(3, 9))), 3)


def test_a_stream_in_a_loader_is_read_in_its_own_order() -> None:
    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield from pool

    posterior, pool = _fitted(mlp, 5, last_layers=1), 2 * draw(12, 5, seed=7)
    expected = errbar.acquire(posterior, [pool], 5).tolist()
    assert errbar.acquire(posterior, DataLoader(Stream(), batch_size=5), 5).tolist() == expected


def test_sequences_that_are_padded_differently() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 3)

        def forward(self, words: Tensor) -> Tensor:
            result: Tensor = self.out(words.tanh().sum(1))
            return result

    posterior = errbar.fit(seeded(Summed), [{"words": draw(20, 4, 3)}], last_layers=1)
    long = 2 * draw(9, 6, 3, seed=5)
    short = torch.cat([long[:4, :2], torch.zeros(4, 4, 3).double()], 1)
    whole = errbar.acquire(posterior, [{"words": torch.cat([short, long[4:]])}], 5)
    parts = errbar.acquire(posterior, [{"words": short[:, :2]}, {"words": long[4:]}], 5)
    assert whole.tolist() == parts.tolist()


@pytest.mark.parametrize("by", ["mutual_information", "entropy", "margin"])
def test_rules_that_look_at_each_input_by_itself(by: str) -> None:
    posterior = _fitted(mlp, 5, last_layers=1).with_calibration(temperature=1.5, covariance_scale=0.5)
    pool = 2 * draw(30, 5, seed=7)
    prediction = posterior.predict(pool, samples=100, seed=3)
    pmf = prediction.pmf.sort(descending=True).values
    scores = {
        "mutual_information": prediction.mutual_information,
        "entropy": -(prediction.pmf * prediction.pmf.log()).sum(1),
        "margin": pmf[:, 1] - pmf[:, 0],
    }[by]
    found = errbar.acquire(posterior, [pool[:11], pool[11:]], 7, by=by, samples=100, seed=3)
    assert found.tolist() == scores.argsort(descending=True)[:7].tolist()


@pytest.mark.parametrize("by", ["mutual_information", "entropy", "margin"])
def test_all_labels_of_an_input_count(by: str) -> None:
    posterior, pool = _fitted(mlp, 5, last_layers=1, outputs="labels"), 2 * draw(30, 5, seed=7)
    prediction = posterior.predict(pool, samples=100, seed=3)
    f = prediction.pmf
    scores = {
        "mutual_information": prediction.mutual_information.sum(1),
        "entropy": torch.distributions.Bernoulli(f).entropy().sum(1),
        "margin": -torch.maximum(f, 1 - f).amin(1),
    }[by]
    found = errbar.acquire(posterior, [pool], 7, by=by, samples=100, seed=3)
    assert found.tolist() == scores.argsort(descending=True)[:7].tolist()


def test_positions_are_refused() -> None:
    words = draw(6, 4, 5)
    posterior = errbar.fit(seeded(lambda: nn.Linear(5, 3)), [words], last_layers=1, outputs="positions")
    for by in module.RULES:
        with pytest.raises(errbar.ArgumentError, match="acquire is for inputs with one class or some labels each"):
            errbar.acquire(posterior, [words], 2, by=by)


def test_random_choice_follows_from_the_seed() -> None:
    posterior, pool = _fitted(mlp, 5, last_layers=1), draw(50, 5, seed=7)
    first = errbar.acquire(posterior, [pool], 10, by="random", seed=1)
    assert len(set(first.tolist())) == 10
    assert first.tolist() == errbar.acquire(posterior, TensorDataset(pool), 10, by="random", seed=1).tolist()
    assert first.tolist() != errbar.acquire(posterior, [pool], 10, by="random", seed=2).tolist()


def test_mistakes() -> None:
    posterior, pool = _fitted(mlp, 5, last_layers=1), draw(10, 5)
    for data in ([pool], TensorDataset(pool)):
        for by in module.RULES:
            with pytest.raises(errbar.ArgumentError, match="k is 11, and the pool holds 10 inputs; expected no more"):
                errbar.acquire(posterior, data, 11, by=by)
    for k in (0, 2.5, True):
        with pytest.raises(errbar.ArgumentError, match="expected a whole number of one or more, of inputs to label"):
            errbar.acquire(posterior, [pool], k)  # type: ignore[arg-type]
    with pytest.raises(errbar.ArgumentError, match="by is 'bald'; expected 'information' or 'mutual_information'"):
        errbar.acquire(posterior, [pool], 1, by="bald")
    with pytest.raises(errbar.ArgumentError, match="Expected a Posterior"):
        errbar.acquire(posterior.information, [pool], 1)  # type: ignore[arg-type]
    for by in module.RULES:
        with pytest.raises(errbar.DataError, match="The pool is empty"):
            errbar.acquire(posterior, [], 1, by=by)
    with pytest.raises(errbar.DataError, match="NaN"):
        errbar.acquire(posterior, [pool * torch.nan], 1)


def test_what_would_not_fit_is_refused_before_anything_is_computed() -> None:
    posterior = _fitted(mlp, 5, last_layers=1)
    with pytest.raises(errbar.SizeError, match=r"tell about 28 parameters needs .* use by='mutual_information'"):
        errbar.acquire(posterior, [draw(3, 5)], 10**12)
