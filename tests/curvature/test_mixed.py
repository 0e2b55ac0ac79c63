"""Mixed structures: one for each part of the parameters, against the parts alone and matrices built by hand."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import errbar
from errbar._curvature.layout import inspect
from errbar._curvature.mixture import Mixture, described_structure
from errbar._curvature.registry import structure_called
from errbar._model.batch import Batch
from errbar._model.network import Network
from errbar._model.selection import Selection, matching
from networks import seeded
from processes import torchrun

CLASSES = 4
FISHERS = ("ggn", "eta", "sampled")
LAMBDA = 2.0
# Mixtures of the network below, and the parameters that each of its structures has.
MIXTURES: dict[str, tuple[dict[str, str], dict[str, tuple[str, ...]]]] = {
    "kron and block": ({"convolution": "kron", "*": "block"}, {"kron": ("convolution",), "block": ("norm", "head")}),
    "a head by kron": ({"head": "kron", "*": "dense"}, {"kron": ("head",), "dense": ("convolution", "norm")}),
    "three": (
        {"head": "dense", "norm": "diag", "convolution": "kron"},
        {"dense": ("head",), "diag": ("norm",), "kron": ("convolution",)},
    ),
    "the longest name decides": (
        {"*": "diag", "head": "kron", "head.bias": "block"},
        {"diag": ("convolution", "norm"), "kron": ("head.weight",), "block": ("head.bias",)},
    ),
}
every_mixture = pytest.mark.parametrize("name", MIXTURES)
every_fisher = pytest.mark.parametrize("fisher", FISHERS)


class Convolutional(nn.Module):
    """A convolution, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.norm(self.convolution(x))).flatten(1))
        return out


def problem(count: int = 30) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 2, 3, 3, generator=generator, dtype=torch.float64)
    return seeded(Convolutional), x, torch.randint(0, CLASSES, (count,), generator=generator)


def fitted(model: nn.Module, data: Any, structure: Any, **options: Any) -> errbar.Posterior:
    settings = {"parameters": "all", "prior": errbar.Prior(LAMBDA)} | options
    return errbar.fit(model, data, structure=structure, **settings)


def positions(model: nn.Module, prefixes: tuple[str, ...]) -> Tensor:
    """Where the parameters under some names lie in the flat vector of all."""
    names = [name for name, value in model.named_parameters() for _ in range(value.numel())]
    own = set().union(*(matching(names, prefix) for prefix in prefixes))
    return torch.tensor([index for index, name in enumerate(names) if name in own])


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    values = {name: value.detach() for name, value in model.named_parameters()}
    parts = vmap(jacrev(lambda given, sample: functional_call(model, given, (sample[None],))[0]), (None, 0))(values, x)
    return torch.cat([part.reshape(*part.shape[:2], -1) for part in parts.values()], -1)


def by_hand(model: nn.Module, x: Tensor, parts: dict[str, tuple[str, ...]], **options: Any) -> Tensor:
    """The information: a plain fit of each part alone, put where its parameters lie, and zeros between them."""
    n = sum(value.numel() for value in model.parameters())
    whole = torch.zeros(n, n, dtype=torch.float64)
    for structure, prefixes in parts.items():
        where = positions(model, prefixes)
        own = errbar.collect(model, [x], parameters=list(prefixes), structure=structure, **options)
        whole[where[:, None], where[None, :]] = own.dense()
    return whole


# ------------------------------------------------------------------------------------------------ against the parts


@every_fisher
@every_mixture
def test_each_part_has_the_information_of_its_structure_alone(name: str, fisher: str) -> None:
    model, x, _ = problem()
    mapping, parts = MIXTURES[name]
    information = errbar.collect(model, [x[:11], x[11:]], parameters="all", structure=mapping, fisher=fisher)
    expected = by_hand(model, x, parts, fisher=fisher)
    torch.testing.assert_close(information.dense(), expected, rtol=1e-10, atol=1e-12)
    assert information.structure == Mixture.of(mapping, ("dense", "block", "kron", "diag")).text


@every_fisher
@every_mixture
def test_covariances_of_logits_are_sums_over_the_parts(name: str, fisher: str) -> None:
    """P by the inverses of the parts' precisions, J by autograd."""
    model, x, _ = problem()
    mapping, parts = MIXTURES[name]
    posterior = fitted(model, [x], mapping, fisher=fisher)
    n = posterior.information.n_parameters
    precision = by_hand(model, x, parts, fisher=fisher) + LAMBDA * torch.eye(n, dtype=torch.float64)
    covariance, J = precision.inverse(), jacobian(model, x)
    torch.testing.assert_close(posterior.covariance(), covariance, rtol=1e-8, atol=1e-10)
    few = J[:7]
    torch.testing.assert_close(posterior.logits(x[:7]).covariance, few @ covariance @ few.mT, rtol=1e-8, atol=1e-10)
    frames = J[:3].flatten(0, 1)
    joint = posterior.joint_logits(x[:3]).covariance.reshape(frames.shape[0], -1)
    torch.testing.assert_close(joint, frames @ covariance @ frames.T, rtol=1e-8, atol=1e-10)
    determinant = float(torch.logdet(precision))
    assert posterior.factor.log_determinant_of_precision() == pytest.approx(determinant, rel=1e-10)


@every_mixture
def test_frames_are_joint_without_a_root_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = problem()
    posterior = fitted(model, [x], MIXTURES[name][0])
    by_root = posterior.joint_logits(x[:4]).covariance
    monkeypatch.setattr("errbar._curvature.structure.ROOT_NUMBERS", 1)
    torch.testing.assert_close(posterior.joint_logits(x[:4]).covariance, by_root, rtol=1e-9, atol=1e-11)


@every_mixture
def test_some_classes_are_rows_and_columns_of_all(name: str) -> None:
    model, x, _ = problem()
    posterior = fitted(model, [x], MIXTURES[name][0])
    whole, some = posterior.logits(x), posterior.logits(x, top=2)
    assert some.classes is not None
    assert torch.equal(some.classes, whole.mean.argsort(1, descending=True)[:, :2])
    torch.testing.assert_close(some.covariance, whole.of_classes(some.classes).covariance, rtol=1e-9, atol=1e-11)


def test_classes_in_another_order_in_another_pass_are_taken_from_all(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, _ = problem()
    posterior = fitted(model, [x], {"head": "kron", "*": "dense"})
    whole = posterior.logits(x)
    kron = type(structure_called("kron"))
    honest = kron.top_gaussians

    def other_order(self: Any, *given: Any) -> Any:
        for gaussian in honest(self, *given):
            yield gaussian.of_classes(torch.tensor([[1, 0]]).expand(len(gaussian), -1))

    monkeypatch.setattr(kron, "top_gaussians", other_order)
    some = posterior.logits(x, top=2)
    assert some.classes is not None
    torch.testing.assert_close(some.covariance, whole.of_classes(some.classes).covariance, rtol=1e-9, atol=1e-11)


@every_mixture
def test_draws_of_the_parameters_have_the_moments_of_the_posterior(name: str) -> None:
    model, x, _ = problem()
    posterior = fitted(model, [x], MIXTURES[name][0])
    draws = 20_000
    values = posterior.sample_parameters(draws, seed=1)
    center = torch.cat([value.detach().reshape(-1) for value in model.parameters()])
    deviations = torch.cat([values[key].reshape(draws, -1) for key, _ in model.named_parameters()], 1) - center
    covariance = posterior.covariance()
    scale = covariance.diagonal().sqrt()
    error = (deviations.T @ deviations / draws - covariance) / scale[:, None] / scale
    assert float(error.abs().max()) <= 6 / draws**0.5
    assert float((deviations.mean(0) / scale).abs().max()) <= 6 / draws**0.5


def test_many_classes_are_predicted_by_draws_that_are_pushed_forward() -> None:
    """The distribution is that of P^g, within the error of the draws."""
    model, x, _ = problem()
    posterior = fitted(model, [x], {"head": "kron", "*": "block"})
    few = posterior.predict(x[:5], samples=2)
    assert few.pmf.shape == (5, CLASSES)
    draws = 4000
    by_logits = posterior.predict(x[:5], samples=draws)
    by_parameters = posterior.drawn_logits(x[:5], draws, 0).predict(draws, 0)
    assert float((by_logits.pmf - by_parameters.pmf).abs().max()) <= 6 * 0.5 / draws**0.5


# ------------------------------------------------------------------------------------------------ sums


@every_fisher
@every_mixture
def test_half_the_data_forgotten_leaves_the_other_half(name: str, fisher: str) -> None:
    model, x, _ = problem()
    mapping = MIXTURES[name][0]
    whole, half = fitted(model, [x], mapping, fisher=fisher), fitted(model, [x[15:]], mapping, fisher=fisher)
    rest = whole.forget([x[:15].flip(0)])
    torch.testing.assert_close(rest.information.dense(), half.information.dense(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(rest.covariance(), half.covariance(), rtol=1e-8, atol=1e-8)
    updated = half.update([x[:15]])
    torch.testing.assert_close(updated.covariance(), whole.covariance(), rtol=1e-8, atol=1e-8)


def test_sums_add_up_and_are_discounted() -> None:
    model, x, _ = problem()
    first, second, whole = (fitted(model, [part], MIXTURES["three"][0]).information for part in (x[:9], x[9:], x))
    torch.testing.assert_close((first + second).dense(), whole.dense(), rtol=1e-10, atol=1e-12)
    # (G ⊗ A)/count of kron is not linear in the sums, but c times all three is c times the information.
    torch.testing.assert_close((whole * 0.25).dense(), whole.dense() / 4, rtol=1e-12, atol=1e-14)


def test_data_that_were_not_seen_are_not_forgotten() -> None:
    model, x, _ = problem()
    posterior = fitted(model, [x], MIXTURES["kron and block"][0])
    with pytest.raises(errbar.ForgetError, match="negative information"):
        posterior.forget([5 * x[:20] + 1])


def test_other_mixtures_are_not_added() -> None:
    model, x, _ = problem()
    first = fitted(model, [x], {"head": "kron", "*": "block"}).information
    second = fitted(model, [x], {"head": "block", "*": "kron"}).information
    with pytest.raises(
        errbar.MismatchError, match=r"different structure .*: head=kron,\*=block and head=block,\*=kron"
    ):
        first + second


def test_one_structure_for_all_is_that_structure() -> None:
    model, x, _ = problem()
    for mapping in ({"*": "kron"}, {"head": "kron", "*": "kron"}, "convolution=kron,head=kron,norm=kron"):
        assert fitted(model, [x], mapping).information.structure == "kron"


# ------------------------------------------------------------------------------------------------ files and ranks


@pytest.mark.parametrize("factors", [False, True])
@every_fisher
@every_mixture
def test_it_is_saved_and_loaded(name: str, fisher: str, factors: bool, tmp_path: Path) -> None:
    model, x, y = problem()
    posterior = fitted(model, [(x, y)], MIXTURES[name][0], fisher=fisher)
    file = tmp_path / "mixed.safetensors"
    posterior.save(file, factors=factors)
    loaded = errbar.load(file, model)
    assert torch.equal(loaded.predict(x).pmf, posterior.predict(x).pmf)
    assert loaded.log_evidence() == pytest.approx(posterior.log_evidence(), rel=1e-12)
    assert loaded.information.structure == errbar.info(file).structure == posterior.information.structure
    assert errbar.verify(file, model).has_factors == factors
    again = loaded.update([x[:5]]).covariance()
    torch.testing.assert_close(again, posterior.update([x[:5]]).covariance(), rtol=1e-9, atol=1e-12)


def test_files_are_merged(tmp_path: Path) -> None:
    model, x, _ = problem()
    mapping = MIXTURES["three"][0]
    for index, part in enumerate((x[:13], x[13:])):
        fitted(model, [part], mapping).information.save(tmp_path / f"{index}.safetensors")
    merged = errbar.merge([tmp_path / "0.safetensors", tmp_path / "1.safetensors"])
    whole = fitted(model, [x], mapping).information
    torch.testing.assert_close(merged.dense(), whole.dense(), rtol=1e-10, atol=1e-12)
    posterior = errbar.condition(merged, errbar.Prior(LAMBDA), model=model)
    assert posterior.logits(x[:3]).covariance.shape == (3, CLASSES, CLASSES)


def test_a_fit_continues_from_its_checkpoint(tmp_path: Path) -> None:
    model, x, _ = problem()
    mapping = MIXTURES["kron and block"][0]
    batches = list(x.split(5))
    file = tmp_path / "checkpoint"

    def interrupted() -> Any:
        yield from batches[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(model, interrupted(), mapping, checkpoint=file, every=2)
    assert errbar.info(file).batches == 2
    continued = fitted(model, iter(batches), mapping, checkpoint=file, every=2)
    torch.testing.assert_close(continued.covariance(), fitted(model, [x], mapping).covariance(), rtol=1e-9, atol=1e-12)
    with pytest.raises(errbar.MismatchError, match="other structure"):
        fitted(model, iter(batches), MIXTURES["three"][0], checkpoint=file, every=2)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"structure": "head=round,*=block"}, "invalid structure: structure gives 'head' 'round'"),
        ({"structure": "tail=kron,*=block"}, "invalid structure: structure names 'tail'"),
        ({"structure": "head=kron"}, "invalid structure: structure gives none for convolution.weight"),
        ({"parts": []}, "has 0 plans for 2 structures"),
        ({"sum": {"form": "mixed", "parts": []}}, "has 0 parts of its sum for 2 structures"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(
    change: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from errbar._files import save, task

    model, x, _ = problem()
    information = fitted(model, [x], {"head": "kron", "*": "block"}).information
    description, tensors = task.information_record(information, None)
    monkeypatch.setattr(save, "information_record", lambda *_: (description | change, tensors))
    information.save(tmp_path / "it.safetensors")
    with pytest.raises(errbar.DamagedFileError, match=re.escape(expected)):
        errbar.merge([tmp_path / "it.safetensors"])


def test_it_is_reduced_over_two_ranks(tmp_path: Path) -> None:
    run = torchrun(2, __file__, str(tmp_path))
    assert run.returncode == 0, run.stderr[-4000:]
    model, x, _ = problem()
    expected = fitted(model, [x], MIXTURES["three"][0], fisher="sampled").covariance()
    for rank in range(2):
        torch.testing.assert_close(torch.load(tmp_path / f"rank{rank}.pt"), expected, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        ({"tail": "kron", "*": "block"}, "structure names 'tail', which no selected parameter lies in; selected are"),
        ({"head": "kron"}, "structure gives none for convolution.weight, convolution.bias, norm.weight, norm.bias;"),
        ({"head": "round", "*": "block"}, "structure gives 'head' 'round'; expected 'dense' or 'block' or 'kron' or"),
        ({"head": "lowrank", "*": "block"}, "'lowrank', whose directions run through all parameters"),
        ({"head": "auto", "*": "block"}, "structure gives 'head' 'auto'; expected"),
        ({"head": 3}, "structure gives 'head' 3; expected"),
        ({"": "kron"}, "structure names ''; expected the name of a module"),
        ({7: "kron"}, "structure names 7; expected the name of a module"),
        ({"a,b": "kron"}, "structure names 'a,b'; expected the name of a module or a parameter, without '=' and ','"),
        ({}, "structure is an empty mapping"),
        ("head=kron,", "structure is 'head=kron,'; expected name=structure for each module"),
        ("head=kron,head=block", "each name once"),
        ("round", "structure is 'round'; expected 'dense' or"),
        (["kron"], r"structure is ['kron']; expected 'dense' or"),
    ],
)
def test_a_mistake_is_one_sentence(structure: Any, expected: str) -> None:
    model, x, _ = problem()
    with pytest.raises(errbar.ArgumentError, match=re.escape(expected)):
        fitted(model, [x], structure)


def test_a_name_is_of_a_whole_module() -> None:
    """'head' is not the beginning of 'header'."""
    mixture = Mixture.parsed("head=kron,*=block", ("kron", "block"))
    assert mixture.assigned(["head.weight", "header.weight"]) == {"kron": ("head.weight",), "block": ("header.weight",)}


def test_a_mixture_is_described_for_people() -> None:
    assert described_structure("head=kron,*=block") == "kron (head) and block (the rest)"
    assert described_structure("a=kron,b=kron,c=kron,d=kron,e=kron,*=diag", most=2) == (
        "kron (a, b and 3 more) and diag (the rest)"
    )


def test_a_graph_cannot_hold_it(tmp_path: Path) -> None:
    model, x, _ = problem()
    posterior = fitted(model, [x], {"head": "kron", "*": "block"})
    with pytest.raises(errbar.ExportError, match="which an exported graph cannot differentiate by"):
        posterior.export(tmp_path / "it.pt2", example=x[:2])


# ------------------------------------------------------------------------------------------------ plan and auto


class Wide(nn.Module):
    """Norms, and a head that is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 60)
        self.norm = nn.LayerNorm(60)
        self.second = nn.Linear(60, 60)
        self.another = nn.LayerNorm(60)
        self.head = nn.Linear(60, 80)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        out: Tensor = self.head(torch.relu(self.another(self.second(hidden))))
        return out


def only(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Let the machine have so many bytes."""
    monkeypatch.setattr("errbar._base.memory.available_bytes", lambda device: size)
    monkeypatch.setattr("errbar._planning.choice.available_bytes", lambda device: size)


def wide() -> tuple[nn.Module, Tensor]:
    return seeded(Wide, dtype=torch.float32), torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


def test_auto_takes_a_large_head_by_kron_and_norms_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = wide()
    only(monkeypatch, 2**27)
    chosen = r"'auto' chose kron \(head\) and block \(the rest\), which is not exact"
    with pytest.warns(errbar.StructureNotice, match=chosen):
        posterior = errbar.fit(model, [x], parameters="vectors", fisher="sampled", structure="auto")
    assert posterior.information.structure == "head=kron,*=block"
    assert posterior.predict(x, samples=20).pmf.shape == (16, 80)
    with pytest.raises(errbar.SizeError, match=r"structure='auto', which takes kron \(head\) and block \(the rest\)"):
        errbar.fit(model, [x], parameters="vectors", fisher="sampled")


def test_auto_keeps_more_modules_exact_the_more_memory_there_is() -> None:
    model, x = wide()
    counts = []
    for memory in (2**25, 2**26, 2**27, 2**28, 2**29):
        best = errbar.plan(model, x, memory=memory, fisher="sampled").best
        assert best is not None
        assert max(best.fit_bytes, best.predict_bytes) <= memory
        counts.append(best.structure.count("=kron") if "=" in best.structure else 9)
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) > 1


def test_a_mixture_is_planned_where_it_divides_the_parameters() -> None:
    model, x = wide()
    given = errbar.plan(model, x, structure={"head": "kron", "*": "block"})
    assert {option.structure for option in given.options} == {"head=kron,*=block"}
    # The head alone is one structure, and is left out.
    assert [option.selected for option in given.options] == ["2", "4", "vectors", "all"]
    assert not any(option.exact for option in given.options)
    lines = str(given).splitlines()
    assert "mixed for" in lines[-1]
    assert lines[-1].endswith("kron (head) and block (the rest)")
    with pytest.raises(errbar.ArgumentError, match="structure names 'tail'"):
        errbar.plan(model, x, structure={"tail": "kron", "*": "block"})


def test_the_cost_is_that_of_the_parts() -> None:
    model, x = wide()
    layout = inspect(Network(model), Batch((x,))).layout
    every = layout.everything()
    sizes: Any = {"batch": 16, "fisher": "ggn", "dtype": torch.float32, "rank": 5}
    mixed = structure_called("head=kron,*=block").cost(layout.workload(every, **sizes))
    head = Selection(("head.weight", "head.bias"), ((80, 60), (80,)))
    rest = every.chosen([name for name in every.names if not name.startswith("head.")])
    kron = structure_called("kron").cost(layout.workload(head, **sizes))
    block = structure_called("block").cost(layout.workload(rest, **sizes))
    assert mixed.posterior_bytes == kron.posterior_bytes + block.posterior_bytes
    assert mixed.once_products == kron.once_products + block.once_products
    assert mixed.seeds[0] == kron.seeds[0] + block.seeds[0]
    assert mixed.draw_products == kron.draw_products + block.draw_products > 0
    assert mixed.fit_bytes >= max(kron.fit_bytes, block.fit_bytes)
    assert mixed.fit_bytes <= kron.fit_bytes + block.fit_bytes


def test_a_module_that_owns_parameters_beside_others_inside_it_is_named_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Module()
            self.inside.norm = nn.LayerNorm(40)
            self.inside.matrix = nn.Parameter(torch.randn(40, 60) / 8)
            self.head = nn.Linear(60, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(torch.tanh(self.inside.norm(x) @ self.inside.matrix))  # type: ignore[operator]
            return out

    only(monkeypatch, 2**24)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errbar.StructureNotice)
        information = errbar.collect(seeded(Nested, dtype=torch.float32), [x], parameters="all", structure="auto")
    assert information.structure == "inside.matrix=kron,*=block"


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    model, x, _ = problem()
    rank = torch.distributed.get_rank()
    own = iter([x[:13]] if rank == 0 else [x[13:]])
    posterior = fitted(model, own, MIXTURES["three"][0], fisher="sampled")
    torch.save(posterior.covariance(), Path(sys.argv[1]) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
