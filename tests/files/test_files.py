"""Posteriors and information in files: what comes back is what was saved, and what does not fit is refused in words."""

from __future__ import annotations

import copy
import json
import os
import pickle
import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import errbar
import make_format_files
from errbar._base import container
from errbar.cli import main
from mutations import sealed
from networks import seeded
from places import FORMAT_FILES

FLOAT64 = torch.float64


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(inplace=True), nn.Linear(6, 4))


def normed() -> nn.Module:
    """Parameters that no linear layer holds, so that Jacobians are formed."""
    return nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7), nn.Tanh(), nn.Linear(7, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 2, padding=1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(36, 3)
    )


class Tokens(nn.Module):
    """A linear layer that is applied to each of three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x.reshape(len(x), 3, 2))).mean(1))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    options: dict[str, Any]
    dtype: torch.dtype = FLOAT64
    prior: Any = 2.0

    def model(self) -> nn.Module:
        return seeded(self.make, dtype=self.dtype)

    def data(self, *, first: int = 0, last: int = 6, labels: bool = True) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(6, 50, 6, generator=generator, dtype=FLOAT64).to(self.dtype)
        y = torch.randint(0, 3, (6, 50), generator=generator)
        return [(x[i], y[i]) if labels else x[i] for i in range(first, last)]

    def fitted(self, model: nn.Module | None = None) -> errbar.Posterior:
        made = errbar.fit(model or self.model(), self.data(), prior=errbar.Prior(self.prior), **self.options)
        return made.with_calibration(temperature=1.3, covariance_scale=0.7)


CASES = {
    "dense": Case(mlp, {"last_layers": 2}),
    "dense in float32": Case(mlp, {"last_layers": 2}, torch.float32),
    "dense in float32 with float64 products": Case(mlp, {"last_layers": 2, "precision": "float64"}, torch.float32),
    "dense by Jacobians": Case(normed, {"parameters": "all"}),
    "dense by Jacobians in float32": Case(normed, {"parameters": "all"}, torch.float32),
    "dense with tokens": Case(Tokens, {"parameters": "all"}),
    "dense eta": Case(mlp, {"last_layers": 2, "fisher": "eta"}),
    "one matrix a class": Case(mlp, {"last_layers": 1, "fisher": "eta"}),
    "one matrix a class in float32": Case(mlp, {"last_layers": 1, "fisher": "eta"}, torch.float32),
    "block": Case(normed, {"parameters": "all", "structure": "block"}),
    "kron": Case(normed, {"parameters": "all", "structure": "kron"}),
    "kron with convolutions": Case(convolutional, {"parameters": "all", "structure": "kron"}),
    "kron in float32": Case(convolutional, {"parameters": "all", "structure": "kron"}, torch.float32),
    "kron of a last layer": Case(mlp, {"last_layers": 1, "structure": "kron"}),
    "diag": Case(mlp, {"parameters": "all", "structure": "diag"}),
    "lowrank": Case(normed, {"parameters": "all", "structure": "lowrank", "rank": np.int64(10)}),
    "lowrank in float32": Case(normed, {"parameters": "all", "structure": "lowrank", "rank": 10}, torch.float32),
    "a prior for each module": Case(mlp, {"last_layers": 2}, prior={"2": 1.5, "4": 0.3}),
    "a prior for each parameter": Case(mlp, {"last_layers": 1}, prior=torch.linspace(0.5, 2, 28)),
}


def numbers(posterior: errbar.Posterior, case: Case) -> dict[str, Tensor]:
    """Everything that a posterior says, and what it says after more data and after less."""
    x = case.data(first=5)[0][0]
    said = {"evidence": torch.tensor(posterior.log_evidence(), dtype=FLOAT64)}
    versions = {"": posterior, "few more": posterior.update(case.data(first=5))}
    versions["many more"] = posterior.update(case.data())
    versions["another prior"] = posterior.with_prior(errbar.Prior(5.0))
    if posterior.information.structure != "lowrank":
        versions["less"] = posterior.forget(case.data(first=5))
    for name, version in versions.items():
        prediction, joint = version.predict(x, samples=50), version.joint_logits(x[:4])
        said |= {
            f"{name} pmf": prediction.pmf,
            f"{name} pmf covariance": prediction.covariance,
            f"{name} joint": joint.covariance,
            f"{name} logits": version.logits(x).covariance,
            f"{name} information": version.information.dense(),
            f"{name} covariance": version.covariance(),
            f"{name} rest": torch.tensor([version.information.n_samples, version.jitter, version.temperature]),
        }
    return said | {f"sampled {k}": v for k, v in posterior.sample_parameters(3, seed=1).items()}


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_posterior_with_factors_is_the_saved_one_to_the_last_bit(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = case.model()
    saved, path = case.fitted(model), tmp_path / "posterior.safetensors"
    saved.save(path, factors=True)
    loaded = errbar.load(path, case.model())
    expected = numbers(saved, case)
    found = numbers(loaded, case)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    assert loaded.covariance_scale == 0.7
    assert loaded.information.log_likelihood == saved.information.log_likelihood
    assert loaded.information.parameter_names == saved.information.parameter_names
    assert type(loaded.logits(case.data()[0][0])) is type(saved.logits(case.data()[0][0]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == FLOAT64])
def test_a_loaded_posterior_without_factors_agrees(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    saved, path = case.fitted(), tmp_path / "posterior.safetensors"
    saved.save(path)
    loaded = errbar.load(path, case.model())
    expected, found = numbers(saved, case), numbers(loaded, case)
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-12, atol=1e-12 * float(value.abs().max())), key


@pytest.mark.parametrize("name", ["dense", "dense by Jacobians"])
def test_a_recursed_covariance_comes_back_to_the_last_bit(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    posterior = case.fitted()
    posterior.covariance()
    few = [(x[:2], y[:2]) for x, y in case.data(first=5)]
    recursed = posterior.update(few)
    assert recursed.factor.recursion_rows > 0  # type: ignore[union-attr]
    recursed.save(tmp_path / "file", factors=True)
    loaded = errbar.load(tmp_path / "file", case.model())
    assert loaded.factor.recursion_rows == recursed.factor.recursion_rows  # type: ignore[union-attr]
    expected, found = numbers(recursed, case), numbers(loaded, case)
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []


def test_information_without_labels_has_no_likelihood_after_loading(tmp_path: Path) -> None:
    case = CASES["dense"]
    information = errbar.collect(case.model(), case.data(labels=False), last_layers=1)
    information.save(tmp_path / "file")
    assert errbar.merge([tmp_path / "file"]).log_likelihood is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CASES)
def test_a_posterior_comes_back_on_the_device_of_the_model(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    saved, path = case.fitted(case.model().cuda()), tmp_path / "posterior.safetensors"
    saved.save(path, factors=True)
    x = case.data()[0][0]
    there, here = errbar.load(path, case.model().cuda()), errbar.load(path, case.model())
    assert torch.equal(there.predict(x).pmf, saved.predict(x).pmf)
    torch.testing.assert_close(here.predict(x).pmf, saved.predict(x).pmf.cpu(), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- what is inside


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_plain_safetensors_without_training_data(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    path = tmp_path / "posterior.safetensors"
    case.fitted().save(path, factors=True)
    with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        arrays = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        assert file.metadata()["kind"] == "posterior"
    read = container.read(path).tensors
    assert set(read) == set(arrays)
    assert all(torch.equal(read[key], arrays[key]) for key in arrays)
    content = path.read_bytes()
    for x, _ in case.data():
        for row in x:
            for dtype in (torch.float32, torch.float64):
                assert row.to(dtype).numpy().tobytes() not in content


def test_of_symmetric_matrices_one_triangle_is_written(tmp_path: Path) -> None:
    posterior = CASES["dense"].fitted()
    n = posterior.information.n_parameters
    triangle = 8 * n * (n + 1) // 2
    seen = posterior.information.seen
    assert seen is not None
    # A description, and a key of 53 bits with a count for each sample.
    room = 3000 + 20 * len(seen.counts)
    for factors, count in ((False, 1), (True, 3)):
        posterior.save(tmp_path / "file", factors=factors)
        assert count * triangle < (tmp_path / "file").stat().st_size < count * triangle + room


@pytest.mark.parametrize("name", CASES)
def test_equal_posteriors_make_equal_files(name: str, tmp_path: Path) -> None:
    for number in (1, 2):
        CASES[name].fitted().save(tmp_path / str(number), factors=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_a_loaded_posterior_saves_the_file_that_it_came_from(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.fitted().save(tmp_path / "1", factors=True)
    errbar.load(tmp_path / "1", case.model()).save(tmp_path / "2", factors=True)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_the_model_is_looked_at_by_its_weights_wherever_it_is_wrapped(tmp_path: Path) -> None:
    case = CASES["dense"]
    case.fitted().save(tmp_path / "file")
    wrapped = nn.DataParallel(case.model())
    assert errbar.load(tmp_path / "file", wrapped).model is wrapped


@pytest.mark.parametrize("factors", [True, False])
def test_a_softening_comes_back(factors: bool, tmp_path: Path) -> None:
    case = CASES["dense"]
    model = case.model()
    softened = case.fitted(model).with_calibration(softening=2.25)
    softened.save(tmp_path / "file", factors=factors)
    loaded = errbar.load(tmp_path / "file", model)
    assert loaded.calibration == errbar.Calibration(1.3, 0.7, 2.25)
    x = case.data()[0][0]
    torch.testing.assert_close(loaded.logits(x).covariance, softened.logits(x).covariance)
    assert errbar.info(tmp_path / "file").softening == errbar.verify(tmp_path / "file", model).softening == 2.25


def test_a_file_without_softening_does_not_mention_it(tmp_path: Path) -> None:
    """So it is the file that earlier versions wrote, and read."""
    posterior = CASES["dense"].fitted()
    posterior.save(tmp_path / "file")
    assert b"softening" not in (tmp_path / "file").read_bytes()
    assert errbar.info(tmp_path / "file").softening == 0
    posterior.information.save(tmp_path / "information")
    assert errbar.info(tmp_path / "information").softening is None


@pytest.mark.parametrize("value", ["-1", '"much"', "true"])
def test_a_softening_that_is_no_number_from_zero_is_refused(value: str, tmp_path: Path) -> None:
    posterior = CASES["dense"].fitted().with_calibration(softening=2.25)
    path = tmp_path / "file"
    posterior.save(path)
    with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
        description = file.metadata()["description"].replace('"softening":2.25', f'"softening":{value}')
    with_metadata(path, description=description)
    with pytest.raises(errbar.DamagedFileError, match=r"softening = .*; expected a finite number in its range"):
        errbar.load(path, CASES["dense"].model())


# --------------------------------------------------------------------------------------------------- older formats


@pytest.mark.parametrize("name", make_format_files.OPTIONS)
@pytest.mark.parametrize("number", range(1, container.FORMAT + 1))
def test_files_of_every_format_keep_loading(name: str, number: int) -> None:
    path = FORMAT_FILES / f"format-{number}-{name}.safetensors"
    assert path.stat().st_size < 20_000
    model = make_format_files.model()
    loaded, expected = errbar.load(path, model, classes=make_format_files.CLASSES), make_format_files.posterior(name)
    assert errbar.verify(path, model).format == number
    x = make_format_files.data()[0][0]
    torch.testing.assert_close(loaded.logits(x).covariance, expected.logits(x).covariance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loaded.logits(x).mean, expected.logits(x).mean, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(
        loaded.information.dense(),
        expected.information.dense(),
        rtol=1e-9,
        atol=1e-9 * float(loaded.covariance().max()),
    )
    assert loaded.log_evidence() == pytest.approx(expected.log_evidence(), rel=1e-9)
    assert (loaded.temperature, loaded.covariance_scale, loaded.prior.precision) == (1.25, 0.75, 0.5)
    assert loaded.softening == 0


def with_metadata(path: Path, **changes: str) -> None:
    """Change what a file says about itself, and seal it again."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] |= changes
    path.write_bytes(sealed(json.dumps(header).encode(), data[8 + length :]))


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    case, path = CASES["dense"], tmp_path / "file"
    case.fitted().save(path)
    with_metadata(path, format="7", errbar="9.9")
    with pytest.raises(errbar.FileError, match=r"has format 7, written by errbar 9\.9; errbar .* reads formats up to"):
        errbar.load(path, case.model())
    with_metadata(path, format="one")
    with pytest.raises(errbar.DamagedFileError, match="has the format 'one'; expected a number"):
        errbar.info(path)


# -------------------------------------------------------------------------------------------------------- refusals


def test_other_weights_are_refused(tmp_path: Path) -> None:
    case = CASES["dense"]
    case.fitted().save(tmp_path / "file", factors=True)
    other = case.model()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-7
    for act in (errbar.load, errbar.verify):
        with pytest.raises(errbar.MismatchError, match=r"other weights .* Give the model of the fit"):
            act(tmp_path / "file", other)
    with pytest.raises(errbar.MismatchError, match=r"other weights"):
        errbar.load(tmp_path / "file", case.model().float())


def test_the_same_weights_in_other_modules_are_refused(tmp_path: Path) -> None:
    class Unusual(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flip(0)).flip(0)

    case = CASES["dense"]
    case.fitted().save(tmp_path / "file")
    other = case.model()
    other[4].__class__ = Unusual  # type: ignore[index]
    with pytest.raises(errbar.MismatchError, match=r"made with the layers 4, which the model does not have"):
        errbar.load(tmp_path / "file", other)


def test_parameters_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    case, path = CASES["diag"], tmp_path / "file"
    case.fitted().save(path)
    description = json.loads(safe_open(path, "pt").metadata()["description"])  # type: ignore[no-untyped-call]
    description["parameters"][0]["name"] = "elsewhere"
    with_metadata(path, description=json.dumps(description))
    with pytest.raises(errbar.MismatchError, match=r"about the parameters elsewhere, 0.bias, .* does not have"):
        errbar.load(path, case.model())


def test_classes_are_kept_and_compared(tmp_path: Path) -> None:
    case, path = CASES["dense"], tmp_path / "file"
    names = ["one", "two", "three", "four"]
    posterior = case.fitted()
    posterior.save(path, classes=names)
    assert errbar.info(path).classes == tuple(names)
    assert errbar.load(path, case.model(), classes=names).temperature == 1.3
    with pytest.raises(errbar.MismatchError, match="saved with the classes one, two, three, four; expected two, one"):
        errbar.load(path, case.model(), classes=["two", "one", "three", "four"])
    with pytest.raises(errbar.ArgumentError, match="classes are 2 names; expected 4"):
        posterior.save(path, classes=["one", "two"])
    posterior.save(path)
    with pytest.raises(errbar.MismatchError, match="saved without names of classes"):
        errbar.load(path, case.model(), classes=names)


def test_what_is_no_file_of_errbar_is_refused(tmp_path: Path) -> None:
    model, path = CASES["dense"].model(), tmp_path / "file"
    with pytest.raises(errbar.FileError, match=r"Cannot read .*file: No such file"):
        errbar.load(path, model)
    with pytest.raises(errbar.FileError, match=r"it is not a file"):
        errbar.load(tmp_path, model)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errbar.FileError, match=r"it is not a file"):
        errbar.load(tmp_path / "pipe", model)
    path.touch()
    with pytest.raises(errbar.DamagedFileError, match=r"is not an errbar file, or is truncated"):
        errbar.load(path, model)
    save_file({"x": torch.ones(3)}, path)
    with pytest.raises(errbar.DamagedFileError, match="__metadata__ = None"):
        errbar.load(path, model)
    save_file({"x": torch.ones(3)}, path, {"who": "somebody else"})
    with pytest.raises(errbar.DamagedFileError, match="a safetensors file, but not one of errbar"):
        errbar.load(path, model)
    for name in (3, b"file", "a\0b", ""):
        for act in (lambda name=name: errbar.load(name, model), lambda name=name: errbar.info(name)):
            with pytest.raises(errbar.ArgumentError, match=r"path is .*; expected the name of a file"):
                act()


def test_a_kind_of_file_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    CASES["dense"].fitted().save(path)
    with_metadata(path, kind="recipe")
    for act in (errbar.info, errbar.verify):
        with pytest.raises(
            errbar.FileError, match="holds 'recipe'; expected one of posterior, information, checkpoint"
        ):
            act(path)


def test_a_file_that_is_larger_than_the_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """Four tebibytes of nothing, which take no room on the disk."""
    path = tmp_path / "file"
    CASES["diag"].fitted().save(path)
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    count = 2**39
    header["sum"] |= {"shape": [count], "data_offsets": [0, 8 * count]}
    path.write_bytes(sealed(json.dumps(header).encode(), b""))
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size + 8 * count)
    with pytest.raises(errbar.SizeError, match=r"Reading .*file needs .* GiB on cpu"):
        errbar.verify(path)


def test_a_model_must_be_a_model(tmp_path: Path) -> None:
    CASES["dense"].fitted().save(tmp_path / "file")
    with pytest.raises(errbar.ArgumentError, match="model is a str"):
        errbar.load(tmp_path / "file", "model")  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- merging


MERGED = [name for name in CASES if CASES[name].dtype == FLOAT64 and "lowrank" not in name]


@pytest.mark.parametrize("name", MERGED)
def test_merged_files_are_the_information_of_all_their_data_and_no_prior(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, everything = case.model(), case.fitted()
    errbar.fit(model, case.data(last=2), prior=errbar.Prior(100.0), **case.options).save(tmp_path / "monday")
    errbar.collect(model, case.data(first=2), **case.options).save(tmp_path / "tuesday")
    merged = errbar.merge([tmp_path / "monday", str(tmp_path / "tuesday")])
    assert (merged.n_samples, merged.structure) == (300, everything.information.structure)
    assert merged.log_likelihood == pytest.approx(everything.information.log_likelihood, rel=1e-12)
    expected = everything.information.dense()
    torch.testing.assert_close(merged.dense(), expected, rtol=1e-12, atol=1e-12 * float(expected.abs().max()))
    made = errbar.condition(merged, errbar.Prior(case.prior), model=case.model())
    x = case.data()[0][0]
    torch.testing.assert_close(
        made.logits(x).covariance, everything.with_calibration(temperature=1, covariance_scale=1).logits(x).covariance
    )


def test_merging_sketches_keeps_their_bounds(tmp_path: Path) -> None:
    case = CASES["lowrank"]
    exact = errbar.collect(case.model(), case.data(), parameters="all").dense()
    for first in (0, 3):
        errbar.collect(case.model(), case.data(first=first, last=first + 3), **case.options).save(tmp_path / str(first))
    merged = errbar.merge([tmp_path / "0", tmp_path / "3"])
    difference = torch.linalg.eigvalsh(exact - merged.dense())
    assert float(difference.abs().max()) <= merged.total.bound * (1 + 1e-9)  # type: ignore[union-attr]
    torch.testing.assert_close(merged.dense().diagonal(), exact.diagonal(), rtol=1e-9, atol=1e-12)


@pytest.fixture
def day(tmp_path: Path) -> Path:
    case = CASES["dense"]
    errbar.collect(case.model(), case.data(last=2), last_layers=2).save(tmp_path / "day")
    return tmp_path / "day"


def test_merged_information_is_information(day: Path, tmp_path: Path) -> None:
    """It adds up, with what was collected here too, can be discounted, copied, saved again, and given a model."""
    case = CASES["dense"]
    merged = errbar.merge([day])
    more = errbar.collect(case.model(), case.data(first=2), last_layers=2)
    for total in (merged + more, more + merged):
        assert total.model is more.model
        assert errbar.condition(total, errbar.Prior(2.0)).information.n_samples == 300
    part = errbar.collect(case.model(), case.data(last=1), last_layers=2)
    assert (merged - part).model is part.model
    assert (merged * 0.5).n_samples == 50
    (merged * 0.5).save(tmp_path / "half")
    assert errbar.info(tmp_path / "half").n_samples == 50.0
    for same in (copy.deepcopy(merged), pickle.loads(pickle.dumps(merged))):
        assert torch.equal(same.dense(), merged.dense())
        assert (same + merged).n_samples == 200
    chosen = errbar.choose_prior(merged.with_model(case.model()))
    assert float(chosen.precision) > 0  # type: ignore[arg-type]


def test_information_without_a_model_says_so(day: Path) -> None:
    merged = errbar.merge([day])
    with pytest.raises(errbar.ModelError, match=r"files hold no model. Give one: condition"):
        merged.model  # noqa: B018
    with pytest.raises(errbar.ArgumentError, match=r"expected condition\(information, prior, model=model\)"):
        errbar.condition(merged, errbar.Prior())
    with pytest.raises(errbar.MismatchError, match="other weights"):
        errbar.condition(merged, errbar.Prior(), model=seeded(normed, dtype=FLOAT64))
    with pytest.raises(errbar.FileError, match=r"holds information, not a posterior. Use errbar.merge"):
        errbar.load(day, CASES["dense"].model())


@pytest.mark.parametrize(
    ("structure", "fisher"),
    [("dense", "ggn"), ("dense", "eta"), ("block", "ggn"), ("kron", "ggn"), ("lowrank", "ggn"), ("diag", "ggn")],
)
def test_sites_without_information_are_merged(structure: str, fisher: str, tmp_path: Path) -> None:
    """A network that is sure of everything: Λ = 0, whatever the data of a site are; only the same file is refused."""
    model = nn.Linear(4, 3, dtype=FLOAT64)
    with torch.no_grad():
        model.weight.copy_(1e6 * torch.eye(3, 4))
    model.bias.data.zero_()
    for site in ("here", "there"):
        x = (
            torch.eye(3, 4, dtype=FLOAT64)
            + torch.rand(3, 4, generator=torch.Generator().manual_seed(len(site)), dtype=FLOAT64) * 1e-2
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            information = errbar.collect(model, [x], last_layers=1, structure=structure, fisher=fisher)
        information.save(tmp_path / site)
    merged = errbar.merge([tmp_path / "here", tmp_path / "there"])
    assert merged.n_samples == 6
    assert not merged.dense().any()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = errbar.condition(merged, errbar.Prior(2.0), model=model)
    torch.testing.assert_close(posterior.covariance(), 0.5 * torch.eye(15, dtype=FLOAT64))
    with pytest.raises(errbar.MismatchError, match=r"hold the same information, whose data would count twice"):
        errbar.merge([tmp_path / "here", tmp_path / "here"])


def test_what_cannot_be_merged_is_refused(day: Path, tmp_path: Path) -> None:
    case, other = CASES["dense"], tmp_path / "other"
    with pytest.raises(errbar.ArgumentError, match="expected a list of paths"):
        errbar.merge(day)  # type: ignore[arg-type]
    with pytest.raises(errbar.ArgumentError, match="paths is empty"):
        errbar.merge([])
    twice = r"copy and .*day hold the same information, whose data would count twice"
    copied = tmp_path / "copy"
    copied.write_bytes(day.read_bytes())
    with pytest.raises(errbar.MismatchError, match=twice):
        errbar.merge([day, copied])
    errbar.condition(errbar.merge([day]), errbar.Prior(7.0), model=case.model()).save(copied, factors=True)
    with pytest.raises(errbar.MismatchError, match=twice):
        errbar.merge([day, copied])
    for changed, options, message in (
        (case.model(), {"last_layers": 1}, "different parameters"),
        (case.model(), {"last_layers": 2, "fisher": "eta"}, "different fisher"),
        (case.model(), {"last_layers": 2, "structure": "block"}, "different structure"),
        (case.model().float(), {"last_layers": 2}, "different weights"),
    ):
        data = [(x.to(next(changed.parameters()).dtype), y) for x, y in case.data(last=1)]
        errbar.collect(changed, data, **options).save(other)  # type: ignore[arg-type]
        with pytest.raises(errbar.MismatchError, match=message):
            errbar.merge([day, other])
    for path, first in ((day, 0), (other, 1)):
        information = errbar.collect(case.model(), case.data(first=first, last=first + 1), last_layers=2)
        information.save(path, classes=list(["abcd", "bcda"][first]))
    with pytest.raises(errbar.MismatchError, match="names other classes"):
        errbar.merge([day, other])


def test_sums_of_different_forms_are_not_added() -> None:
    case = CASES["one matrix a class"]
    information = errbar.collect(case.model(), case.data(), **case.options)
    dense = errbar.collect(case.model(), case.data(), last_layers=1)
    odd = replace(information, total=dense.total)
    with pytest.raises(errbar.MismatchError, match="summed in different forms"):
        information + odd


# ------------------------------------------------------------------------------------- what a file says, and commands


def test_a_description_is_what_was_saved(tmp_path: Path) -> None:
    case, path = CASES["a prior for each module"], tmp_path / "file"
    posterior = case.fitted()
    posterior.save(path, factors=True)
    for found in (errbar.info(path), errbar.verify(path), errbar.verify(path, case.model())):
        assert (found.kind, found.structure, found.fisher, found.dtype) == ("posterior", "dense", "ggn", "float64")
        assert found.parameters == {"2.weight": (6, 7), "2.bias": (6,), "4.weight": (4, 6), "4.bias": (4,)}
        assert (found.n_parameters, found.n_classes, found.n_samples) == (76, 4, 300)
        assert (found.temperature, found.covariance_scale, found.has_factors) == (1.3, 0.7, True)
        assert found.precision == {"2": 1.5, "4": 0.3}
        assert found.weights == posterior.information.network.fingerprint
        assert (found.errbar_version, found.torch_version) == (errbar.__version__, torch.__version__)
        assert found.bytes == path.stat().st_size
    CASES["a prior for each parameter"].fitted().save(path)
    assert errbar.info(path).precision == "one for each parameter"
    assert not errbar.info(path).has_factors


def test_the_commands_info_and_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FORMAT_FILES / "format-1-dense.safetensors"
    result = CliRunner().invoke(main.application(), ["info", str(path)])
    assert result.exit_code == 0
    assert "kind              posterior\n" in result.output
    assert "classes           yes, no\n" in result.output
    assert "parameters        0.weight, 0.bias, 2.weight, 2.bias\n" in result.output
    assert "softening         0.0\n" in result.output
    result = CliRunner().invoke(main.application(), ["verify", str(path), "make_format_files:model"])
    assert result.output.endswith(f"{path} is whole, and about the weights of make_format_files:model.\n")
    assert CliRunner().invoke(main.application(), ["verify", str(path)]).output.endswith("is whole.\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others.py").write_text("from torch import nn\nnetwork = nn.Linear(2, 2)\n")
    for arguments, message in (
        (["verify", str(path), "others:network"], "other weights"),
        (["verify", str(path), "others"], "expected package.module:callable"),
        (["verify", str(path), "others:missing"], "cannot be imported"),
        (["verify", str(path), "nowhere:missing"], "cannot be imported"),
        (["info", str(tmp_path / "missing")], "No such file"),
    ):
        with pytest.raises(SystemExit, match=r"^1$"):
            main.main(arguments)
        assert message in capsys.readouterr().err
