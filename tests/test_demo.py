"""The demo and the experiments it is made of, on sizes that take no time."""

from __future__ import annotations

import copy
import io
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import errbar
from errbar import demo
from errbar.cli import main
from errbar.demo import DemoSettings, Digits, Samples, Score, train_network
from errbar.errors import ArgumentError, DataError, MissingExtraError
from errbar.experiments.baselines import dropout_pmf, ensemble_pmf, softmax_pmf
from errbar.experiments.evaluation import contrasting
from errbar.experiments.networks import paper_network
from errbar.experiments.training import train

TINY = DemoSettings(
    train_size=300,
    validation_size=80,
    epochs=10,
    members=2,
    dropout_samples=3,
    priors=(1.0, 10.0),
    candidates=({"last_layers": 1},),
    frames=2,
    objects=3,
)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return demo.load(TINY)


@pytest.fixture(scope="module")
def posterior(digits: Digits) -> errbar.Posterior:
    network = _train(nn.Linear(64, 10), digits.train, seed=0)
    return errbar.fit(network, digits.train.data(), last_layers=1, prior=errbar.Prior(1.0))


def _train(model: nn.Module, samples: Samples, seed: int) -> nn.Module:
    return train(model, samples.x, samples.y, epochs=2, learning_rate=1e-2, weight_decay=0.0, batch_size=16, seed=seed)


def _weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_the_split_is_a_partition_with_equal_shares_of_each_class(digits: Digits) -> None:
    sizes = [len(part.y) for part in digits]
    assert sizes == [300, 80, 1797 - 380]
    everything = torch.cat([part.x for part in digits])
    assert everything.min() == 0.0
    assert everything.max() == 1.0
    # The digits hold no two equal images, so a row that comes twice was put in two parts.
    assert len(everything.unique(dim=0)) == 1797
    total = torch.bincount(torch.cat([part.y for part in digits]))
    for part in digits:
        expected = total * len(part.y) / 1797
        assert (torch.bincount(part.y) - expected).abs().max() <= 2  # two splits, each right to one digit


def test_the_last_two_of_five_layers_have_4450_parameters() -> None:
    layers = [module for module in paper_network(64, dropout=0.1) if isinstance(module, nn.Linear)]
    assert len(layers) == 5
    assert sum(p.numel() for layer in layers[-2:] for p in layer.parameters()) == 4450


def test_training_depends_on_its_seed_and_on_nothing_else(digits: Digits) -> None:
    first_start, second_start = (nn.Sequential(nn.Linear(64, 10), nn.Dropout(0.5)) for _ in range(2))
    before = _weights(first_start)
    first = _train(first_start, digits.train, seed=3)
    torch.rand(7)  # another state of the global generator
    second = _train(second_start, digits.train, seed=3)
    assert torch.equal(_weights(first), _weights(second))
    assert not torch.equal(_weights(first), _weights(_train(first_start, digits.train, seed=4)))
    assert torch.equal(_weights(first_start), before)
    assert first_start.training
    assert not first.training


def test_training_leaves_the_global_generator_alone(digits: Digits) -> None:
    model = nn.Sequential(nn.Linear(64, 10), nn.Dropout(0.5))
    state = torch.get_rng_state()
    _train(model, digits.train, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_learns(digits: Digits) -> None:
    network = demo.train_network(digits.train, DemoSettings(epochs=15), seed=0)
    assert (softmax_pmf(network, digits.train.x).argmax(1) == digits.train.y).double().mean() > 0.9


def test_training_refuses_labels_that_do_not_match(digits: Digits) -> None:
    with pytest.raises(DataError, match="as many labels as inputs"):
        _train(nn.Linear(64, 10), Samples(digits.train.x, digits.train.y[:-1]), seed=0)


def test_temperature_divides_the_logits(digits: Digits) -> None:
    network = nn.Linear(64, 10)
    expected = (network(digits.test.x) / 2.5).softmax(1)
    torch.testing.assert_close(softmax_pmf(network, digits.test.x, 2.5), expected.detach())


def test_an_ensemble_is_the_mean_of_its_members(digits: Digits) -> None:
    first, second = nn.Linear(64, 10), nn.Linear(64, 10)
    expected = (softmax_pmf(first, digits.test.x) + softmax_pmf(second, digits.test.x)) / 2
    torch.testing.assert_close(ensemble_pmf([first, second], digits.test.x), expected)
    with pytest.raises(ArgumentError, match="at least one network"):
        ensemble_pmf([], digits.test.x)


def test_mc_dropout_depends_on_its_seed_and_leaves_the_model_and_the_generator_alone(digits: Digits) -> None:
    # In training mode the batch norm would change its running mean: only dropout may be switched on.
    model = nn.Sequential(nn.Linear(64, 20), nn.BatchNorm1d(20), nn.Dropout(0.5), nn.Linear(20, 10)).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = dropout_pmf(model, digits.test.x, samples=3, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert torch.equal(first, dropout_pmf(model.eval(), digits.test.x, samples=3, seed=0))
    assert not torch.equal(first, dropout_pmf(model, digits.test.x, samples=3, seed=1))
    torch.testing.assert_close(first.sum(1), torch.ones(len(first)))


def test_many_dropout_masks_average_to_the_mean_over_masks() -> None:
    # One unit, kept with probability 1/2 and then doubled: f_0 is sigmoid(2) or sigmoid(0), each half of the time.
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0], [0.0]]))
    values = torch.tensor([2.0, 0.0]).sigmoid()
    pmf = dropout_pmf(model, torch.ones(1, 1), samples=2000, seed=0)
    tolerance = 4 * float(values.std(correction=0)) / 2000**0.5
    assert abs(float(pmf[0, 0] - values.mean())) < tolerance


@pytest.mark.parametrize("model", [nn.Linear(64, 10), nn.Sequential(nn.Linear(64, 10), nn.Dropout(0.0))])
def test_mc_dropout_refuses_a_model_without_dropout(model: nn.Module, digits: Digits) -> None:
    with pytest.raises(ArgumentError, match="needs a network with dropout"):
        dropout_pmf(model, digits.test.x)


def test_dropout_is_a_rate() -> None:
    with pytest.raises(ArgumentError, match="rate in"):
        paper_network(64, dropout=1.0)


def test_frames_belong_to_their_image_and_follow_from_the_seed(digits: Digits) -> None:
    x = digits.test.x[:40]
    frames = demo.make_frames(x, 3, seed=0)
    assert frames.shape == (40, 3, 64)
    assert torch.equal(frames, demo.make_frames(x, 3, seed=0))
    assert not torch.equal(frames, demo.make_frames(x, 3, seed=1))
    assert not torch.equal(frames[:, 0], frames[:, 1])
    distance = torch.cdist(frames.flatten(0, 1), x)
    nearest = distance.argmin(1).reshape(40, 3)
    assert (nearest == torch.arange(40)[:, None]).double().mean() > 0.8  # 1/40 by chance


def test_frames_are_scored_by_all_four_ways_of_fusion(posterior: errbar.Posterior, digits: Digits) -> None:
    rows = demo.fuse_digit_frames(posterior, digits.test, TINY)
    assert [row.method.split()[0] for row in rows] == ["one", "mean", "fused", "fused"]
    frames = demo.make_frames(digits.test.x[:3], 2, TINY.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.FusionNotice)
        pmf = torch.cat([errbar.fuse_frames(posterior.joint_logits(group)).predict().pmf for group in frames])
    assert rows[3].log_likelihood == errbar.metrics.log_likelihood(pmf, digits.test.y[:3])
    tracks = torch.cat([errbar.Track(posterior).add(group).predict().pmf for group in frames])
    assert rows[2].log_likelihood == errbar.metrics.log_likelihood(tracks, digits.test.y[:3])
    fused = errbar.fuse([posterior.logits(frames[:, number]) for number in range(2)]).predict().pmf
    torch.testing.assert_close(tracks, fused, rtol=0, atol=1e-4)


def test_four_views_of_150_digits_fused_are_at_least_as_good_as_one(digits: Digits) -> None:
    network = train_network(digits.train, replace(TINY, epochs=20), seed=0)
    made = errbar.fit(network, digits.train.data(), last_layers=1, prior=errbar.Prior(10.0))
    made = errbar.calibrate(made, digits.validation.data())
    rows = demo.fuse_digit_frames(made, digits.test, replace(TINY, frames=4, objects=150))
    one, fused = rows[0], rows[2]
    assert fused.accuracy >= one.accuracy
    assert fused.log_likelihood >= one.log_likelihood


def test_risk_rows_are_those_of_the_prediction(posterior: errbar.Posterior, digits: Digits) -> None:
    x = digits.test.x[5:6]
    rows = demo.assess_risk(posterior, x, 0.05)
    prediction = posterior.predict(x)
    assert [row.label for row in rows] == list(range(10))
    assert [row.pmf for row in rows] == prediction.pmf[0].tolist()
    assert [row.risk for row in rows] == prediction.risk(0.05)[0].tolist()
    assert [row.softmax for row in rows] == softmax_pmf(posterior.model, x)[0].tolist()
    assert all(row.lower <= row.upper for row in rows)


def test_the_most_ambiguous_input_has_the_closest_two_best_classes() -> None:
    assert demo.most_ambiguous(torch.tensor([[0.8, 0.1, 0.1], [0.45, 0.4, 0.15], [0.4, 0.3, 0.3]])) == 1


def test_figure_one_takes_similar_pmfs_with_different_logit_uncertainty() -> None:
    pmf = torch.tensor([[0.98, 0.01, 0.01], [0.6, 0.3, 0.1], [0.31, 0.59, 0.1], [0.6, 0.31, 0.09], [0.4, 0.35, 0.25]])
    scale = torch.tensor([1.0, 1.0, 2.0, 9.0, 100.0])  # the last is the most uncertain, but like no other
    gaussian = errbar.LogitGaussian(pmf.log(), scale[:, None, None] * torch.eye(3))
    assert contrasting(gaussian, pmf) == (0, 3, 1)


def test_figure_one_makes_do_with_sure_digits() -> None:
    pmf = torch.tensor([[0.99, 0.01], [0.9, 0.1], [0.95, 0.05]])
    gaussian = errbar.LogitGaussian(
        pmf.log(), torch.eye(2).expand(3, 2, 2) * torch.tensor([1.0, 1.0, 4.0])[:, None, None]
    )
    assert contrasting(gaussian, pmf) == (0, 2, 1)


def test_the_best_of_each_column_is_marked_whichever_way_is_up() -> None:
    table = demo.score_table("", [Score("a", "", 0.9, -10.0, 0.2, 0.02), Score("b", "", 0.8, -9.0, 0.1, 0.03)])
    marked = [["bold" in str(cell) for cell in column.cells] for column in table.columns[1:]]
    assert marked == [[True, False], [False, True], [False, True], [True, False]]


def test_tables_are_whole_on_80_columns() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    fitted = "λ 100 T 1.50 T_c 0.0053"
    console.print(demo.score_table("", [Score("(iii) ensemble of 10", fitted, 0.954, -1131.5, 0.068, 0.0199)]))
    assert fitted in console.export_text()


def _small_network(inputs: int, dropout: float = 0.0) -> nn.Sequential:
    layers = [nn.Linear(inputs, 12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 10)]
    return nn.Sequential(*(layer for layer in layers if not isinstance(layer, nn.Dropout) or dropout))


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")  # so few digits need not determine T_c
def test_run_prints_the_same_numbers_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "paper_network", _small_network)
    threads, printed = torch.get_num_threads(), []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=[]):
            state = torch.manual_seed(seed).get_state()
            demo.run(tmp_path, progress=False, settings=TINY)
            assert torch.equal(torch.get_rng_state(), state)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    expected = ("(i) standard", "(viii) autofit", "T alone", "classifier B", "fused as a track", "Pr{f > 0.05}")
    for words in (*expected, "try next"):
        assert words in printed[0]
    assert torch.get_num_threads() == threads
    for name in ("reliability.png", "figure-one.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")
def test_with_json_the_demo_says_one_object_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "paper_network", _small_network)
    monkeypatch.setattr(demo, "DemoSettings", lambda: TINY)
    # The exit of a command that succeeds.
    with torch.random.fork_rng(devices=[]), pytest.raises(SystemExit, match=r"^0$"):
        main.main(["demo", "--json", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    facts = json.loads(printed)
    assert facts["methods"][0]["method"] == "(i) standard"
    assert facts["figures"] == [str(tmp_path / name) for name in ("reliability.png", "figure-one.png")]
    assert len(facts["risk"]) == 10
    assert {row["parameters"] for row in facts["autofit"]} == {"last layer"}


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArgumentError, match="is a file; expected a folder"):
        demo.run(file)


def test_without_scikit_learn_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install '\.\[demo\]'"):
        demo.load(TINY)


@pytest.mark.filterwarnings("ignore::errbar.CalibrationWarning")
def test_each_method_takes_the_prior_with_the_best_validation_nll(digits: Digits) -> None:
    network = _train(_small_network(64), digits.train, seed=0)
    x, y = digits.validation
    chosen = []
    for priors in ((0.01, 10.0), (10.0, 0.01)):
        posteriors = demo.choose_posteriors(network, digits, DemoSettings(priors=priors))
        chosen.append([posterior.prior.precision for posterior in posteriors])
        nll = errbar.metrics.nll(posteriors[0].predict(x).pmf, y)
        others = [posteriors[0].with_prior(errbar.Prior(precision)) for precision in priors]
        assert nll == min(errbar.metrics.nll(other.predict(x).pmf, y) for other in others)
        assert [posterior.information.fisher for posterior in posteriors] == ["eta", "eta", "ggn"]
    assert chosen[0] == chosen[1]


def test_no_priors_to_choose_from_is_refused(digits: Digits) -> None:
    with pytest.raises(ArgumentError, match="priors is empty"):
        demo.choose_posteriors(nn.Linear(64, 10), digits, DemoSettings(priors=()))
