"""Models as users have them: any dtype, any layers, any wrapper, any mode; and data as users have them.

The reference is a loop over samples and classes with plain autograd on a copy of the model.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import errbar
from comparison import assert_close
from data import draw, drawn_labels
from errbar import Prior

FLOAT64 = torch.float64


def seeded(model: nn.Module, seed: int = 0, dtype: torch.dtype = FLOAT64) -> nn.Module:
    """The model with weights that depend on the seed alone."""
    model = model.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=FLOAT64) * 0.5
            parameter.copy_(values + (1.0 if parameter.ndim == 1 else 0.0))
    return model


def mlp(seed: int = 0, dtype: torch.dtype = FLOAT64) -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), seed, dtype)


def labels(count: int = 10, classes: int = 3) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(3))


def plausible_labels(model: nn.Module, x: Tensor) -> Tensor:
    """Labels drawn from what the model itself predicts, so that a temperature of about one is right."""
    with torch.no_grad():
        pmf = torch.softmax(copy.deepcopy(model).eval()(x), 1)
    return drawn_labels(pmf, seed=4)


def logits_of(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits


def reference_jacobians(model: nn.Module, names: tuple[str, ...], *args: Tensor, **kwargs: Tensor) -> Tensor:
    """∂g/∂θ of each sample by one backward pass for each class, (B, M, n)."""
    model = copy.deepcopy(model).eval()
    chosen = [p.requires_grad_() for name, p in model.named_parameters() if name in names]
    rows = []
    for index in range(len([*args, *kwargs.values()][0])):
        one = slice(index, index + 1)
        logits = logits_of(model(*(a[one] for a in args), **{k: v[one] for k, v in kwargs.items()}))[0]
        gradients = [
            torch.autograd.grad(value, chosen, retain_graph=True, allow_unused=True, materialize_grads=True)
            for value in logits
        ]
        rows.append(torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in gradients]))
    return torch.stack(rows).detach()


def reference(model: nn.Module, names: tuple[str, ...], *args: Tensor, prior: float = 1.0, **kwargs: Tensor) -> Any:
    """The information matrix, and the logit covariance of the same inputs."""
    J = reference_jacobians(model, names, *args, **kwargs).double()
    with torch.no_grad():
        g = logits_of(copy.deepcopy(model).eval()(*args, **kwargs)).double()
    f = torch.softmax(g, 1)
    information = torch.zeros(J.shape[2], J.shape[2], dtype=FLOAT64)
    for jacobian, pmf in zip(J, f, strict=True):
        information += jacobian.T @ (torch.diag(pmf) - torch.outer(pmf, pmf)) @ jacobian
    P = torch.linalg.inv(information + prior * torch.eye(len(information), dtype=FLOAT64))
    return information, torch.stack([jacobian @ P @ jacobian.T for jacobian in J])


def assert_right(model: nn.Module, *args: Tensor, tolerance: float = 1e-8, **select: Any) -> errbar.Posterior:
    """A fit of the model equals the reference; returned for further checks."""
    select = select or {"parameters": "all"}
    batch, x = ((args[0],), args[0]) if len(args) == 1 else (args, args)
    posterior = errbar.fit(model, [batch], **select)
    information, covariance = reference(model, posterior.information.parameter_names, *args)
    assert float(information.abs().max()) > 0
    assert_close(posterior.information.dense(), information, tolerance)
    assert_close(posterior.logits(x).covariance, covariance, tolerance)
    return posterior


# --------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_are_float64_for_float64_models_and_else_float32(dtype: torch.dtype) -> None:
    model, x, y = mlp(dtype=dtype), draw(10, 4, dtype=dtype), labels()
    out = torch.float64 if dtype == torch.float64 else torch.float32
    posterior = errbar.fit(model, [(x, y)], last_layers=1)
    assert posterior.information.dense().dtype == torch.float64
    assert posterior.covariance().dtype == torch.float64
    gaussian, joint = posterior.logits(x), posterior.joint_logits(x[:2])
    for tensor in (gaussian.mean, gaussian.covariance, gaussian.variance, joint.mean, joint.covariance):
        # What tells near copies apart does not survive float32.
        assert tensor.dtype == (torch.float64 if tensor is joint.covariance else out)
        assert tensor.device == next(model.parameters()).device
        assert not tensor.requires_grad
    prediction = posterior.predict(x, samples=20)
    for name in ("pmf", "covariance", "std", "confidence", "standard_error", "entropy", "mutual_information"):
        assert getattr(prediction, name).dtype == out
    assert prediction.label.dtype == torch.int64
    assert prediction.risk(0.1).dtype == prediction.interval()[0].dtype == prediction.samples().dtype == out
    assert posterior.predict_by_parameters(x, samples=3).pmf.dtype == out
    assert {value.dtype for value in posterior.sample_parameters(2).values()} == {dtype}
    assert errbar.fuse([gaussian, gaussian]).mean.dtype == errbar.fuse_frames(joint).mean.dtype == out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 0.02)])
def test_narrow_models_agree_with_wide_ones(dtype: torch.dtype, tolerance: float) -> None:
    """The difference is the rounding of the network's own numbers: 2⁻²⁴, 2⁻⁹ and 2⁻¹²."""
    narrow = mlp(dtype=dtype)
    wide = copy.deepcopy(narrow).double()
    x = draw(10, 4).to(dtype)
    for last_layers in (1, 2):
        a = errbar.fit(narrow, [x], last_layers=last_layers, prior=Prior(2.0))
        b = errbar.fit(wide, [x.double()], last_layers=last_layers, prior=Prior(2.0))
        assert_close(a.information.dense(), b.information.dense(), tolerance)
        assert_close(a.logits(x).covariance, b.logits(x.double()).covariance, tolerance)
        assert float((a.predict(x).pmf - b.predict(x.double()).pmf).abs().max()) <= tolerance


def test_float64_precision_on_a_float32_model() -> None:
    narrow, x = mlp(dtype=torch.float32), draw(40, 4, dtype=torch.float32)
    wide = copy.deepcopy(narrow).double()
    a = errbar.fit(narrow, [x], last_layers=2, precision="float64")
    b = errbar.fit(wide, [x.double()], last_layers=2)
    assert_close(a.information.dense(), b.information.dense(), 1e-6)
    assert_close(a.logits(x).covariance, b.logits(x.double()).covariance, 5e-6)
    assert a.logits(x).mean.dtype == torch.float32


def test_inputs_are_cast_to_the_model() -> None:
    x = draw(10, 4)
    posterior = errbar.fit(mlp(dtype=torch.float32), [x], last_layers=1)
    assert torch.equal(posterior.predict(x).pmf, posterior.predict(x.float()).pmf)


def test_autocast_around_calls_changes_nothing() -> None:
    model, x = mlp(dtype=torch.float32), draw(100, 4, dtype=torch.float32)
    y = plausible_labels(model, x)
    posterior = errbar.fit(model, [(x, y)], last_layers=2)
    prediction = posterior.predict(x, samples=100)
    calibrated = errbar.calibrate(posterior, [(x, y)], fit="temperature", samples=100)
    frames = errbar.fuse_frames(posterior.joint_logits(x[:2]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = errbar.fit(model, [(x, y)], last_layers=2)
        again = posterior.predict(x, samples=100)
        covariance, risk, (low, high) = again.covariance, again.risk(0.2), again.interval()
        tempered = errbar.calibrate(posterior, [(x, y)], fit="temperature", samples=100)
        fused = errbar.fuse_frames(posterior.joint_logits(x[:2]))
        updated = posterior.update([x[:1]])
        by_parameters = posterior.predict_by_parameters(x, samples=3).pmf
        centred, variance = posterior.logits(x).centered().covariance, posterior.logits(x).contrast_variance
    assert torch.equal(inside.covariance(), posterior.covariance())
    assert torch.equal(again.pmf, prediction.pmf)
    assert torch.equal(covariance, prediction.covariance)
    assert torch.equal(risk, prediction.risk(0.2))
    assert torch.equal(low, prediction.interval()[0])
    assert torch.equal(high, prediction.interval()[1])
    assert tempered.temperature == calibrated.temperature
    assert torch.equal(fused.covariance, frames.covariance)
    assert torch.equal(updated.covariance(), posterior.update([x[:1]]).covariance())
    assert torch.equal(by_parameters, posterior.predict_by_parameters(x, samples=3).pmf)
    assert torch.equal(centred, posterior.logits(x).centered().covariance)
    assert torch.equal(variance, posterior.logits(x).contrast_variance)


@pytest.mark.parametrize("around", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_gradient_modes_around_calls_change_nothing(around: Callable[[], Any]) -> None:
    model, x, y = mlp(), draw(10, 4), labels()
    outside = errbar.fit(model, [(x, y)], last_layers=2)
    with around():
        inside = errbar.fit(model, [(x.clone(), y.clone())], last_layers=2)
        pmf = inside.predict(x.clone(), samples=50).pmf
        outside.covariance()
        updated = outside.update([(x[:2].clone(), y[:2].clone())])
        forgotten = outside.forget([(x[:2].clone(), y[:2].clone())])
    assert torch.equal(inside.covariance(), outside.covariance())
    assert torch.equal(pmf, outside.predict(x, samples=50).pmf)
    # What was made inside goes on outside, and the other way round.
    assert torch.equal(inside.predict(x, samples=50).pmf, pmf)
    assert_close(updated.forget([(x[:2], y[:2])]).covariance(), outside.covariance())
    assert_close(forgotten.update([(x[:2], y[:2])]).covariance(), outside.covariance())
    assert inside.log_evidence() == pytest.approx(outside.log_evidence())


def test_a_model_made_in_inference_mode_is_refused() -> None:
    """Nothing can be differentiated by its weights, and they have no version counter to watch."""
    with torch.inference_mode():
        model = mlp()
    with pytest.raises(errbar.ModelError, match=r"made under torch\.inference_mode"):
        errbar.fit(model, [draw(10, 4)], last_layers=2)


# ------------------------------------------------------------------------------------------ the model is not touched


class Busy(nn.Module):
    """Dropout, BatchNorm, a frozen layer, hooks and gradients: everything a call could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.dropout(torch.tanh(self.norm(self.first(x)))))


def busy() -> nn.Module:
    model = seeded(Busy())
    model.norm.running_mean.copy_(draw(6, seed=8))
    model.train()
    model.norm.eval()  # mixed modes, as in fine-tuning
    model.first.weight.requires_grad_(False)
    model(draw(10, 4)).sum().backward()
    return model


def snapshot(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, part in model.named_modules():
        found[f"mode of {name}"] = part.training
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks"):
            found[f"{kind} of {name}"] = list(getattr(part, kind).items())
        found[f"attributes of {name}"] = {key: id(value) for key, value in vars(part).items() if key != "training"}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        found[name] = (id(parameter), parameter._version, parameter.requires_grad, id(gradient))
        found[f"gradient of {name}"] = None if gradient is None else gradient.tolist()
    for name, buffer in model.named_buffers():
        found[name] = (id(buffer), buffer._version, buffer.tolist())
    return found


def test_the_model_is_left_as_it_was() -> None:
    model = busy()
    model.last.register_forward_hook(lambda module, args, output: None)
    before = snapshot(model)
    x = draw(10, 4)
    y = plausible_labels(model, x)
    posterior = assert_right(model, x, last_layers=2)
    posterior.predict(x)
    posterior.joint_logits(x)
    posterior.predict_by_parameters(x, samples=2)
    posterior.update([x]).forget([x])
    errbar.calibrate(errbar.fit(model, [(x, y)], last_layers=1), [(x, y)], fit="temperature", samples=20)
    errbar.outlier_scores(posterior, [(x, y)], samples=20)
    assert snapshot(model) == before


def failing_batches() -> Iterator[Tensor]:
    yield draw(5, 4)
    raise OSError("the disk is gone")


def test_the_model_is_left_as_it_was_when_a_call_fails() -> None:
    model = busy()
    posterior = errbar.fit(model, [draw(10, 4)], last_layers=1)
    before = snapshot(model)
    with pytest.raises(OSError, match="the disk is gone"):
        errbar.collect(model, failing_batches(), last_layers=1)
    with pytest.raises(OSError, match="the disk is gone"):
        posterior.update(failing_batches())
    with pytest.raises(errbar.DataError, match="NaN or infinite"):
        posterior.predict(draw(3, 4) * float("nan"))
    with pytest.raises(Exception, match=r"."):
        posterior.predict(draw(3, 9))
    assert snapshot(model) == before


def test_hooks_of_the_user_take_part() -> None:
    """A hook that changes the output is part of the function that the model computes."""
    model, hooked, x = mlp(), mlp(), draw(10, 4)
    calls = []
    hooked[2].register_forward_hook(lambda module, args, output: calls.append(1) or output * 2.0)
    posterior = errbar.fit(hooked, [x], last_layers=1)
    assert calls
    assert_close(posterior.logits(x).mean, model(x).detach() * 2)
    J = 2 * reference_jacobians(model, ("2.weight", "2.bias"), x)
    expected = torch.einsum("bmn,nk,blk->bml", J, posterior.covariance(), J)
    assert_close(posterior.logits(x).covariance, expected)


def test_frozen_parameters_count() -> None:
    model, x = mlp(), draw(10, 4)
    frozen = mlp().requires_grad_(False)
    for select in ({"last_layers": 1}, {"parameters": "all"}, {"parameters": ["0.bias", "2"]}):
        a, b = errbar.collect(model, [x], **select), errbar.collect(frozen, [x], **select)
        assert a.parameter_names == b.parameter_names
        assert torch.equal(a.dense(), b.dense())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_threads_predict_at_the_same_time() -> None:
    model = busy()
    x = draw(40, 4)
    posterior = errbar.fit(model, [x], last_layers=2)
    before = snapshot(model)
    expected = [posterior.predict(x[i : i + 5], samples=50).pmf for i in range(0, 40, 5)]
    results: dict[tuple[int, int], Tensor] = {}
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        try:
            start.wait()
            for repeat in range(3):
                for i in range(8):
                    part = (i + 2 * thread) % 8
                    pmf = posterior.predict(x[5 * part : 5 * part + 5], samples=50).pmf
                    results[thread, 8 * repeat + part] = pmf
                    assert model.training
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(results) == 96
    for (_, part), pmf in results.items():
        assert torch.equal(pmf, expected[part % 8])
    assert snapshot(model) == before


def test_threads_fit_at_the_same_time() -> None:
    x, expected = draw(10, 4), errbar.fit(mlp(), [draw(10, 4)], last_layers=2).covariance()
    model, found = mlp(), []
    threads = [
        threading.Thread(target=lambda: found.append(errbar.fit(model, [x], last_layers=2).covariance()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(P, expected) for P in found)


# --------------------------------------------------------------------------------------------------------- wrappers


def test_data_parallel_is_looked_through() -> None:
    model, x = mlp(), draw(10, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = nn.DataParallel(model)
    a, b = errbar.fit(wrapped, [x], last_layers=2), errbar.fit(model, [x], last_layers=2)
    assert a.model is wrapped
    assert a.information.parameter_names == b.information.parameter_names
    assert torch.equal(a.covariance(), b.covariance())
    assert torch.equal(a.predict(x).pmf, b.predict(x).pmf)
    assert (a.information + b.information).n_samples == 20


@pytest.mark.filterwarnings("ignore")
def test_compiled_models_are_looked_through() -> None:
    model, x = mlp(), draw(10, 4)
    wrapped = torch.compile(model, backend="eager")
    a, b = errbar.fit(wrapped, [x], last_layers=2), errbar.fit(model, [x], last_layers=2)
    assert a.information.parameter_names == b.information.parameter_names
    assert torch.equal(a.covariance(), b.covariance())
    wrapped(x)
    assert torch.equal(a.predict(x).pmf, b.predict(x).pmf)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 2}])
def test_models_compiled_in_place_are_looked_through(select: dict[str, Any]) -> None:
    """`model.compile()` binds the compiled call to the user's module: parameters and mode must not leak from it."""
    plain, x = seeded(Busy()).eval(), draw(10, 4)
    model = seeded(Busy()).train()
    model.compile(backend="eager")
    a, b = errbar.fit(model, [x], **select), errbar.fit(plain, [x], **select)
    assert_close(a.information.dense(), b.information.dense())
    assert_close(a.logits(x).covariance, b.logits(x).covariance)
    assert model.training


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_part_of_a_model_is_looked_through() -> None:
    x = draw(10, 4)
    a = errbar.fit(Outer(torch.compile(mlp(), backend="eager")), [x], parameters="all")
    b = errbar.fit(Outer(mlp()), [x], parameters="all")
    assert_close(a.information.dense(), b.information.dense())
    assert_close(a.logits(x).covariance, b.logits(x).covariance)


def test_distributed_data_parallel_is_looked_through() -> None:
    """In a process of its own: a process group is global state."""
    script = """
        import socket, torch, errbar
        from torch import nn
        import torch.distributed as dist
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        wrapped = nn.parallel.DistributedDataParallel(model)
        x = torch.randn(10, 4, dtype=torch.float64)
        a, b = (errbar.fit(m, [x], last_layers=2) for m in (wrapped, model))
        assert a.information.parameter_names == ("0.weight", "0.bias", "2.weight", "2.bias")
        assert torch.equal(a.covariance(), b.covariance())
        assert torch.equal(a.predict(x).pmf, b.predict(x).pmf)
        dist.destroy_process_group()
        print("same")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout.strip().endswith("same"), run.stderr[-2000:]


# ------------------------------------------------------------------------------------------------- which parameters


class Backwards(nn.Module):
    """Registered in another order than executed; the norm and the module that runs twice count once."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)
        self.unused = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(torch.tanh(self.first(x)))
        return self.head(self.norm(self.shared(torch.tanh(x))))


@pytest.mark.parametrize(
    ("last_layers", "modules"),
    [
        (1, ["head"]),
        (2, ["head", "norm"]),
        (3, ["head", "norm", "shared"]),
        (4, ["head", "norm", "shared", "first"]),
    ],
)
def test_the_last_layers_are_those_that_ran_last(last_layers: int, modules: list[str]) -> None:
    posterior = assert_right(seeded(Backwards()), draw(10, 4), last_layers=last_layers)
    expected = tuple(f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))
    assert posterior.information.parameter_names == expected
    assert posterior.information.n_parameters == sum(
        p.numel() for name, p in posterior.model.named_parameters() if name in expected
    )


def test_a_layer_that_never_runs_is_no_layer() -> None:
    with pytest.raises(errbar.SelectionError, match=r"only 4 layers with parameters ran: first, shared, norm, head"):
        errbar.collect(seeded(Backwards()), [draw(10, 4)], last_layers=5)


def test_parameters_that_never_run_keep_their_prior() -> None:
    posterior = assert_right(seeded(Backwards()), draw(10, 4), parameters="all")
    start = sum(p.numel() for n, p in posterior.model.named_parameters() if n.split(".")[0] in ("head", "norm"))
    P = posterior.covariance()[start : start + 20, start : start + 20]
    assert_close(P, torch.eye(20, dtype=FLOAT64))


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        ("head", ("head.weight", "head.bias")),
        (["shared", "head.bias"], ("head.bias", "shared.weight", "shared.bias")),
        (["first.weight"], ("first.weight",)),
        (("norm", "norm.weight"), ("norm.weight", "norm.bias")),
    ],
)
def test_parameters_by_module_or_exact_name(parameters: Any, names: tuple[str, ...]) -> None:
    posterior = assert_right(seeded(Backwards()), draw(10, 4), parameters=parameters)
    assert posterior.information.parameter_names == names


def test_a_prefix_is_a_module_and_not_a_beginning() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.fc2 = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc(x))

    information = errbar.collect(seeded(Twins()), [draw(4, 4)], parameters="fc")
    assert information.parameter_names == ("fc.weight", "fc.bias")


def test_the_flat_order_is_that_of_parameters_to_vector() -> None:
    model, x = mlp(), draw(10, 4)
    posterior = errbar.fit(model, [x], parameters="all", prior=Prior(torch.arange(1.0, 44.0)))
    assert_close(
        posterior.covariance(), torch.linalg.inv(posterior.information.dense() + torch.diag(torch.arange(1.0, 44.0)))
    )
    drawn = posterior.sample_parameters(3)
    assert list(drawn) == [name for name, _ in model.named_parameters()]
    assert [tuple(value.shape[1:]) for value in drawn.values()] == [tuple(p.shape) for p in model.parameters()]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ({"parameters": "all"}, ("encoder.weight", "encoder.bias", "decoder.bias")),
        ({"last_layers": 1}, ("encoder.weight", "decoder.bias")),
        ({"parameters": "encoder"}, ("encoder.weight", "encoder.bias")),
        ({"parameters": "decoder"}, ("encoder.weight", "decoder.bias")),
        ({"parameters": ["decoder.weight"]}, ("encoder.weight",)),
    ],
)
def test_tied_weights_are_one_parameter_whatever_they_are_called(select: Any, names: tuple[str, ...]) -> None:
    posterior = assert_right(seeded(Tied()), draw(10, 4), **select)
    assert posterior.information.parameter_names == names


def normalised(x: Tensor) -> Tensor:
    return nn.functional.normalize(x, dim=1)


def two_heads(model: Any, x: Tensor) -> Tensor:
    """As face detectors do: the logits first, the box last."""
    hidden = torch.tanh(model.first(x))
    logits: Tensor = model.last(hidden)
    model.box(hidden)
    return logits


class Headed(nn.Module):
    """A body and what a head may be made of, put together by a function."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.box = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)
        self.prototypes, self.scale = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(1))
        self.experts, self.gate = nn.ModuleList(nn.Linear(4, 3) for _ in range(3)), nn.Linear(4, 3)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


@pytest.mark.parametrize(
    ("compute", "names"),
    [
        (two_heads, ("last.weight", "last.bias")),
        (lambda m, x: nn.functional.linear(m.first(x), m.last.weight), ("last.weight",)),
        (lambda m, x: nn.functional.linear(m.first(x), 0.3 * m.last.weight, m.last.bias), ("last.weight", "last.bias")),
        (lambda m, x: m.scale * normalised(m.first(x)) @ normalised(m.prototypes).T, ("prototypes", "scale")),
        (lambda m, x: -(m.first(x)[:, None] - m.prototypes).square().sum(2), ("prototypes",)),
        (lambda m, x: m.first(torch.tanh(m.first(x))) @ m.first.weight, ("first.weight", "first.bias")),
    ],
    ids=["two heads", "functional", "functional with bias", "cosine", "prototypes", "tied"],
)
def test_the_last_layer_is_the_one_that_makes_the_logits(
    compute: Callable[[Any, Tensor], Tensor], names: tuple[str, ...]
) -> None:
    """Whether a module call or a function of its weight makes them; what runs after them is no layer of theirs."""
    model, x = seeded(Headed(compute)), draw(8, 4)
    posterior = assert_right(model, x, last_layers=1)
    assert set(posterior.information.parameter_names) == set(names)
    plan = errbar.plan(model, x)
    assert plan.options[0].n_parameters == posterior.information.n_parameters
    automatic = errbar.collect(model, [x], last_layers=1, structure="auto")
    assert automatic.parameter_names == posterior.information.parameter_names


def test_layers_that_run_in_vain_are_not_counted() -> None:
    with pytest.raises(
        errbar.SelectionError, match=r"only 2 layers with parameters ran: first, last\..*not depend on box"
    ):
        errbar.collect(seeded(Headed(two_heads)), [draw(8, 4)], last_layers=3)


def test_a_tied_head_without_a_module_is_the_last_layer() -> None:
    class TiedHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.norm(self.embedding(x).mean(1)), self.embedding.weight)

    x = torch.randint(0, 7, (8, 3), generator=torch.Generator().manual_seed(2))
    assert assert_right(seeded(TiedHead()), x, last_layers=1).information.parameter_names == ("embedding.weight",)


def weighted_experts(model: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.first(x))
    weights = torch.softmax(model.gate(hidden), 1)
    return sum(weights[:, k : k + 1] * expert(hidden) for k, expert in enumerate(model.experts))  # type: ignore[return-value]


def chosen_expert(model: Any, x: Tensor) -> Tensor:
    """The last sample of eight goes to another expert than the others."""
    hidden, chosen = torch.tanh(model.first(x)), (x[:, 0] > 5).long()
    logits = x.new_zeros(len(x), 3)
    for k, expert in enumerate(model.experts[:2]):
        if bool((chosen == k).any()):
            logits[chosen == k] = expert(hidden[chosen == k])
    return logits


@pytest.mark.parametrize(
    ("compute", "skipped"),
    [
        (weighted_experts, r"experts\.0\.weight, .*experts\.1\.bias, gate\.weight, gate\.bias"),
        (chosen_expert, r"experts\.0\.weight, experts\.0\.bias"),
        (lambda m, x: m.last(m.first(x)) + m.gate(x), r"last\.weight, last\.bias"),
        (lambda m, x: m.last(torch.tanh(m.first(x))) * m.scale.exp(), r"scale"),
    ],
    ids=["experts", "an expert for each sample", "two branches", "temperature"],
)
def test_parameters_as_near_to_the_logits_are_not_left_out_silently(
    compute: Callable[[Any, Tensor], Tensor], skipped: str
) -> None:
    x = draw(8, 4)
    x[:, 0] = torch.tensor([0.0] * 7 + [9.0])
    with pytest.warns(UserWarning, match=rf"leave out parameters that are as close to the logits: {skipped}\. Their"):
        errbar.collect(seeded(Headed(compute)), [x], last_layers=1)


@pytest.mark.parametrize("parameters", ["box", ["last", "box"], ["box.bias", "last"], "last.unused"])
def test_parameters_on_which_the_logits_do_not_depend_are_refused(parameters: Any) -> None:
    model = Headed(two_heads)
    model.last.unused = nn.Parameter(torch.zeros(2))
    with pytest.raises(
        errbar.SelectionError, match=r"logits do not depend on '(box|box\.bias|last\.unused)'.*exactly zero"
    ):
        errbar.collect(seeded(model), [draw(8, 4)], parameters=parameters)


def test_a_derivative_that_is_exactly_zero_is_refused() -> None:
    model, x = seeded(Headed(lambda m, x: m.last(m.first(x)) + 0 * m.gate(x))), draw(40, 4)
    for select in ({"last_layers": 1}, {"parameters": "gate"}):
        with pytest.raises(errbar.SelectionError, match=r"logits do not depend on .*exactly zero over the first batch"):
            errbar.collect(model, [x], **select)


def test_one_sample_with_a_derivative_is_enough() -> None:
    x = draw(40, 4)
    x[:, 0] = torch.tensor([0.0] * 39 + [9.0])
    information = errbar.collect(seeded(Headed(chosen_expert)), [x], parameters="experts.1")
    assert information.n_parameters == 15


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_a_saturated_network_has_no_information_and_says_so(structure: str, fisher: str) -> None:
    model = mlp()
    with torch.no_grad():
        model[2].bias[1] = 3000.0
    with pytest.warns(UserWarning, match=r"no information at all.*the posterior is the prior"):
        posterior = errbar.fit(model, [draw(8, 4)], last_layers=2, structure=structure, fisher=fisher)
    assert not posterior.information.dense().any()
    assert_close(posterior.covariance(), torch.eye(43, dtype=FLOAT64))
    assert_close(posterior.predict(draw(3, 4)).pmf, torch.eye(3, dtype=FLOAT64)[[1, 1, 1]])


@pytest.mark.parametrize("make", [lambda: nn.LogSoftmax(1), lambda: LogProbabilities()])
@pytest.mark.parametrize("structure", ["dense", "block", "kron", "lowrank"])
def test_log_probabilities_are_logits(make: Callable[[], nn.Module], structure: str) -> None:
    plain, x = mlp(), draw(10, 4)
    select: dict[str, Any] = {"last_layers": 2, "structure": structure}
    posterior, expected = (
        errbar.fit(model, [x], **select).with_calibration(temperature=1.4, covariance_scale=0.7)
        for model in (nn.Sequential(*plain, make()), plain)
    )
    ours, theirs = posterior.logits(x).centered(), expected.logits(x).centered()
    assert_close(ours.mean, theirs.mean)
    assert_close(ours.covariance, theirs.covariance)
    assert_close(posterior.predict(x).pmf, expected.predict(x).pmf)
    assert_close(posterior.predict(x).covariance, expected.predict(x).covariance)


class LogProbabilities(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log_softmax(x, 1)


class BfloatBody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5).bfloat16(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.bfloat16())).float())


class AutocastInside(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.body, self.head, self.whole = nn.Linear(4, 5), nn.Linear(5, 3), whole

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = torch.tanh(self.body(x))
            if self.whole:
                return self.head(hidden)
        return self.head(hidden.float())


@pytest.mark.parametrize("make", [BfloatBody, lambda: AutocastInside(False), lambda: AutocastInside(True)])
@pytest.mark.parametrize("select", [{"last_layers": 1}, {"last_layers": 2}])
@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_models_of_several_dtypes(make: Callable[[], nn.Module], select: dict[str, Any], structure: str) -> None:
    """Parameters of several dtypes, and autocast inside the model: to what bfloat16 can tell."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make()
    x = draw(12, 4, dtype=torch.float32)
    posterior = errbar.fit(model, [x], structure=structure, **select)
    wide = nn.Sequential(model.body, nn.Tanh(), model.head)  # type: ignore[arg-type]
    expected = errbar.fit(copy.deepcopy(wide).double(), [x], structure=structure, **select)
    assert posterior.logits(x).mean.dtype == torch.float32
    assert_close(posterior.logits(x).covariance, expected.logits(x).covariance, 0.05)
    assert_close(posterior.predict(x).pmf, expected.predict(x).pmf, 0.02)


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
@pytest.mark.parametrize("kind", [nn.EmbeddingBag, nn.Embedding])
@pytest.mark.filterwarnings("ignore:structure='kron' treats '0' as 'diag' does")
def test_sparse_embeddings(kind: Any, structure: str) -> None:
    """`sparse=True` is about gradients for optimisers; the derivative is the same, and the model keeps its flag."""
    x = torch.randint(0, 9, (8, 3), generator=torch.Generator().manual_seed(2))

    def made(sparse: bool) -> nn.Module:
        width = 4 if kind is nn.EmbeddingBag else 12
        return seeded(nn.Sequential(kind(9, 4, sparse=sparse), nn.Flatten(), nn.Tanh(), nn.Linear(width, 3)))

    model = made(True)
    found, expected = (errbar.fit(each, [x], parameters="all", structure=structure) for each in (model, made(False)))
    assert_close(found.information.dense(), expected.information.dense())
    assert_close(found.logits(x).covariance, expected.logits(x).covariance)
    assert model[0].sparse


def test_traced_graphs_are_models() -> None:
    plain, x = mlp(), draw(10, 4)
    for select in ({"last_layers": 1}, {"last_layers": 2}, {"parameters": "all"}):
        found = errbar.fit(torch.fx.symbolic_trace(plain), [x], **select)
        expected = errbar.fit(plain, [x], **select)
        assert_close(found.information.dense(), expected.information.dense())
        assert_close(found.predict(x).pmf, expected.predict(x).pmf)


# ------------------------------------------------------------------------------------------------------ architectures


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.block = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.input(x)))
        x = x + torch.relu(self.block(x))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 1}, {"last_layers": 3}])
def test_convolutions_group_norm_and_residuals(select: dict[str, Any]) -> None:
    assert_right(seeded(Residual()), draw(6, 1, 5, 5), **select)


class Tempered(nn.Module):
    """A learned temperature, as CLIP's `logit_scale`: a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))) * self.scale.exp()


def restricted_to(structure: str, information: Tensor, model: nn.Module) -> Tensor:
    """What a structure keeps of the information; of Kronecker factors, for one sample."""
    if structure in ("dense", "lowrank"):
        return information
    if structure == "diag":
        return information.diagonal().diag()
    owners = [name.rpartition(".")[0] for name, p in model.named_parameters() for _ in range(p.numel())]
    same = torch.tensor([[a == b for b in owners] for a in owners])
    return torch.where(same, information, 0.0)


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_parameters_without_dimensions(structure: str, tmp_path: Any) -> None:
    """The whole flow; Kronecker factors of one sample are exact, and of more they are not."""
    model, x = seeded(Tempered()), draw(1 if structure == "kron" else 12, 4)
    more, frames = draw(3, 4, seed=5), draw(4, 4, seed=6)
    options = {"rank": 60} if structure == "lowrank" else {}
    posterior = errbar.fit(model, [x], parameters="all", structure=structure, prior=Prior(2.0), **options)
    names = posterior.information.parameter_names
    assert names == ("scale", "body.weight", "body.bias", "head.weight", "head.bias")
    information = restricted_to(structure, reference(model, names, x)[0], model)
    assert_close(posterior.information.dense(), information)
    P = torch.linalg.inv(information + 2.0 * torch.eye(len(information), dtype=FLOAT64))
    assert_close(posterior.covariance(), P)
    J = reference_jacobians(model, names, frames)
    assert_close(posterior.logits(frames).covariance, J @ P @ J.mT)
    assert_close(posterior.joint_logits(frames).covariance, torch.einsum("imp,pq,jnq->imjn", J, P, J))
    with torch.no_grad():
        assert_close(posterior.logits(frames).mean, model(frames))
    drawn = posterior.sample_parameters(5, seed=2)
    assert {name: tuple(value.shape) for name, value in drawn.items()} == {
        name: (5, *p.shape) for name, p in model.named_parameters()
    }
    assert bool((posterior.predict_by_parameters(frames, samples=4).std > 0).all())
    updated = posterior.update([more])
    assert float(updated.covariance().trace()) < float(P.trace())
    if structure != "lowrank":
        assert_close(updated.forget([more]).covariance(), P, 1e-7)
    posterior.save(tmp_path / "posterior.errbar")
    loaded = errbar.load(tmp_path / "posterior.errbar", model)
    assert torch.equal(loaded.predict(frames).pmf, posterior.predict(frames).pmf)
    with pytest.raises(errbar.ExportError, match=r"about scale, body\.weight.*cannot differentiate by"):
        posterior.export(tmp_path / "posterior.pt2", example=frames)


@pytest.mark.parametrize("structure", ["dense", "block", "kron", "diag", "lowrank"])
def test_a_parameter_without_dimensions_alone(structure: str) -> None:
    model, x = seeded(Tempered()), draw(12, 4)
    posterior = errbar.fit(model, [x], parameters=["scale"], structure=structure)
    information, covariance = reference(model, ("scale",), x)
    assert_close(posterior.information.dense(), information)
    assert_close(posterior.logits(x).covariance, covariance)


def test_parameters_without_dimensions_where_no_batching_rule_exists() -> None:
    """Control flow on values is differentiated sample by sample."""

    class Branching(Tempered):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(-x if x[0, 0] > 0 else x)

    model, rows = seeded(Branching()), list(draw(6, 4).split(1))
    names = tuple(name for name, _ in model.named_parameters())
    information = torch.stack([reference(model, names, row)[0] for row in rows]).sum(0)
    for structure in ("dense", "lowrank"):
        posterior = errbar.fit(model, rows, parameters="all", structure=structure, rank=60)
        assert_close(posterior.information.dense(), information)


def test_a_plan_with_parameters_without_dimensions() -> None:
    options = errbar.plan(seeded(Tempered()), draw(8, 4)).options
    assert {option.n_parameters for option in options if option.parameters == "all"} == {44}


def test_batch_norm_with_running_statistics() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)))
    model[1].running_mean.copy_(draw(3))
    model[1].running_var.copy_(draw(3).exp())
    assert_right(model.train(), draw(6, 1, 5, 5), parameters=["1", "4"])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.cell = kind(3, 4, batch_first=batch_first)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.cell(x if self.batch_first else x.transpose(0, 1))
        return self.head(output[:, -1] if self.batch_first else output[-1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 1}])
def test_recurrent_networks(kind: type[nn.Module], batch_first: bool, select: dict[str, Any]) -> None:
    assert_right(seeded(Recurrent(kind, batch_first)), draw(5, 6, 3), **select)


class Tokens(nn.Module):
    """Embedding and a transformer layer; the padding mask comes as a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.embedding(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.encoder(hidden, src_key_padding_mask=padding)
        return self.head(hidden.mean(1))


def token_ids(count: int = 5) -> Tensor:
    return torch.randint(0, 11, (count, 7), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 1}, {"last_layers": 3}])
def test_token_models_with_attention(select: dict[str, Any]) -> None:
    assert_right(seeded(Tokens()), token_ids(), **select)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0][:, 0])


def test_attention_counts_as_one_layer_with_its_projections() -> None:
    posterior = assert_right(seeded(Attending()), draw(6, 5, 4), last_layers=2)
    assert posterior.information.parameter_names == tuple(name for name, _ in posterior.model.named_parameters())


@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 1}, {"last_layers": 2}])
def test_weight_norm(select: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 3)))
    posterior = assert_right(seeded(model), draw(10, 4), **select)
    names = posterior.information.parameter_names
    assert "2.parametrizations.weight.original0" in names
    assert "2.parametrizations.weight.original1" in names
    assert "2.bias" in names


class InContainers(nn.Module):
    """Modules that are also kept in plain containers, and called from there."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)
        self.steps = make([self.first, torch.tanh, self.dropout, self.last])

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps.values() if isinstance(self.steps, dict) else self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("make", [list, tuple, lambda steps: dict(enumerate(steps))], ids=["list", "tuple", "dict"])
@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 1}])
def test_modules_called_from_plain_containers(make: Callable[[Any], Any], select: dict[str, Any]) -> None:
    assert_right(seeded(InContainers(make)).train(), draw(10, 4), **select)


class InClosures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        self.head = lambda h: self.last(h)
        self.body = self._body

    def _body(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 1}])
def test_modules_called_from_closures_are_right_or_refused(select: dict[str, Any]) -> None:
    """A closure over the model cannot be seen from outside; derivatives of zero would be silently wrong."""
    x, expected = draw(10, 4), errbar.collect(mlp(), [draw(10, 4)], **select)
    try:
        information = errbar.collect(seeded(InClosures()), [x], **select)
    except errbar.ErrbarError:
        return
    assert_close(information.dense(), expected.dense())


class Awkward(nn.Module):
    """Two linear layers, put together by a function that does something unusual with them."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def logits_scaled_in_place(model: Any, x: Tensor) -> Tensor:
    logits = model.last(torch.tanh(model.first(x)))
    logits /= 3.0
    return logits


def logits_overwritten_in_part(model: Any, x: Tensor) -> Tensor:
    logits = model.last(torch.tanh(model.first(x)))
    logits[:, 0] = 2 * logits[:, 1]
    return logits


def residual_in_place(model: Any, x: Tensor) -> Tensor:
    hidden = model.first(x)
    hidden += x
    return model.last(torch.tanh(hidden))


def activation_in_place(model: Any, x: Tensor) -> Tensor:
    return model.last(torch.relu_(model.first(x)))


def weight_used_outside_its_layer(model: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(model.first(x))
    return model.last(hidden) + torch.sin(nn.functional.linear(hidden, model.last.weight))


def weight_normalised_outside_its_layer(model: Any, x: Tensor) -> Tensor:
    return model.last(torch.tanh(model.first(x))) / model.last.weight.norm()


def layer_called_by_its_weights_alone(model: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(torch.tanh(model.first(x)), model.last.weight, model.last.bias)


def layer_called_twice(model: Any, x: Tensor) -> Tensor:
    return model.last(torch.tanh(model.first(torch.tanh(model.first(x)))))


def tokens_before_samples(model: Any, x: Tensor) -> Tensor:
    """(T, B, q) with as many tokens as samples: the first dimension is not the batch."""
    scale = torch.linspace(0.5, 2.0, 6, dtype=x.dtype)[:, None, None]
    return model.last(torch.tanh(model.first(x[None] * scale))).square().sum(0)


def logits_transposed_twice(model: Any, x: Tensor) -> Tensor:
    return model.last(torch.tanh(model.first(x))).T.flip(0).T


@pytest.mark.parametrize("select", [{"parameters": "all"}, {"parameters": "last"}, {"parameters": "first"}])
@pytest.mark.parametrize(
    "compute",
    [
        logits_scaled_in_place,
        logits_overwritten_in_part,
        residual_in_place,
        activation_in_place,
        weight_used_outside_its_layer,
        weight_normalised_outside_its_layer,
        layer_called_by_its_weights_alone,
        layer_called_twice,
        tokens_before_samples,
        logits_transposed_twice,
    ],
)
@pytest.mark.parametrize("fisher", ["ggn", "eta"])
def test_layers_put_together_in_unusual_ways(
    compute: Callable[[Any, Tensor], Tensor], select: dict[str, Any], fisher: str
) -> None:
    """Whatever shortcut is taken for linear layers, the derivative is that of the function computed."""
    model, x = seeded(Awkward(compute)), draw(6, 4)
    posterior = errbar.fit(model, [x], fisher=fisher, **select)
    J = reference_jacobians(model, posterior.information.parameter_names, x)
    f = torch.softmax(model(x).detach(), 1)
    weight = torch.diag_embed(f) - f[:, :, None] * f[:, None, :]
    if fisher == "eta":
        weight = torch.diag_embed(weight.diagonal(dim1=1, dim2=2))
    assert_close(posterior.information.dense(), torch.einsum("bmn,bml,blk->nk", J, weight, J))
    expected = torch.einsum("bmn,nk,blk->bml", J, posterior.covariance(), J)
    assert_close(posterior.logits(x).covariance, expected)
    assert_close(posterior.logits(x).mean, model(x).detach())
    joint = torch.einsum("imn,nk,jlk->imjl", J[:3], posterior.covariance(), J[:3])
    assert_close(posterior.joint_logits(x[:3]).covariance, joint)


class DataDependent(nn.Module):
    """Python control flow on values, which cannot be vectorised over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.a(row) if float(row.sum()) > 0 else self.b(row) for row in x])


def test_control_flow_on_values() -> None:
    assert_right(seeded(DataDependent()), draw(8, 4))


@pytest.mark.parametrize("select", [{"parameters": "all"}, {"last_layers": 1}])
def test_one_logit_is_the_pair_zero_and_it(select: dict[str, Any]) -> None:
    x = draw(10, 4)
    model = seeded(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)))
    posterior = assert_right(model, x, **select)
    gaussian = posterior.logits(x)
    assert gaussian.mean.shape == (10, 2)
    assert bool((gaussian.mean[:, 0] == 0).all())
    assert bool((gaussian.variance[:, 0] == 0).all())
    for y in (labels(10, 2), labels(10, 2)[:, None], labels(10, 2).double(), labels(10, 2).float()[:, None]):
        assert errbar.collect(model, [(x, y)], last_layers=1).n_samples == 10
        errbar.outlier_scores(posterior, [(x, y)], samples=20)
    certain = posterior.logits(x).scaled(0.0).predict(1).pmf
    assert_close(certain[:, 1], torch.sigmoid(model(x).detach())[:, 0], 1e-12)


# --------------------------------------------------------------------------------------------------------------- data


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class HuggingFaceLike(Tokens):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = super().forward(input_ids, attention_mask)
        return Output(logits, logits)


def test_mappings_go_to_the_model_as_keywords_and_outputs_have_logits() -> None:
    model, ids = seeded(HuggingFaceLike()), token_ids()
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels(5)}
    posterior = errbar.fit(model, [batch], last_layers=1)
    information, covariance = reference(
        model, posterior.information.parameter_names, input_ids=ids, attention_mask=mask
    )
    assert_close(posterior.information.dense(), information)
    assert_close(posterior.logits({"input_ids": ids, "attention_mask": mask}).covariance, covariance)
    assert_close(posterior.logits(batch).covariance, covariance)
    assert posterior.predict_by_parameters(batch, samples=3).pmf.shape == (5, 3)
    assert posterior.update([batch]).forget([batch]).information.n_samples == 5
    assert isinstance(posterior.log_evidence(), float)


def test_every_form_of_data_says_the_same() -> None:
    model, x, y = mlp(), draw(10, 4), labels()
    expected = errbar.collect(model, [(x, y)], last_layers=1).dense()

    class Streamed(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            yield from zip(x, y, strict=True)

    class Rows(Dataset):
        def __len__(self) -> int:
            return 10

        def __getitem__(self, row: int) -> Tensor:
            return x[row]

    forms: list[Any] = [
        [x],
        [(x,)],
        [[x, y]],
        [(x, y, "names", 3)],
        ((x[i : i + 3], y[i : i + 3]) for i in range(0, 10, 3)),
        TensorDataset(x, y),
        TensorDataset(x),
        Rows(),
        Streamed(),
        DataLoader(TensorDataset(x, y), batch_size=4),
        DataLoader(Rows(), batch_size=4),
        DataLoader(Streamed(), batch_size=4),
        (x[:4], x[4:]),
    ]
    for data in forms:
        information = errbar.collect(model, data, last_layers=1)
        assert information.n_samples == 10
        assert_close(information.dense(), expected, 1e-12)


def test_a_dataset_does_not_draw_from_the_global_generator() -> None:
    model = mlp()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    errbar.collect(model, TensorDataset(draw(10, 4)), last_layers=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_iterable_is_read_once() -> None:
    read = []

    def stream() -> Iterator[Tensor]:
        for i in range(3):
            read.append(i)
            yield draw(4, 4, seed=i)

    posterior = errbar.fit(mlp(), stream(), last_layers=1)
    assert read == [0, 1, 2]
    posterior.covariance()
    posterior.update(stream())
    assert read == [0, 1, 2, 0, 1, 2]


def test_unpack_reads_batches_of_any_form() -> None:
    model, x = mlp(), draw(30, 4)
    y = plausible_labels(model, x)
    data = [{"image": x, "meta": {"class": y}}]

    def unpack(batch: Any) -> tuple[Any, Any, Any]:
        return (batch["image"],), {}, batch["meta"]["class"]

    expected = errbar.fit(model, [(x, y)], last_layers=1)
    posterior = errbar.fit(model, data, last_layers=1, unpack=unpack)
    assert torch.equal(posterior.covariance(), expected.covariance())
    assert posterior.log_evidence() == expected.log_evidence()
    assert errbar.collect(model, data, last_layers=1, unpack=unpack).n_samples == 30
    assert posterior.update(data, unpack=unpack).information.n_samples == 60
    assert posterior.forget(data, unpack=unpack).information.n_samples == 0
    options = {"fit": "temperature", "samples": 50}
    a = errbar.calibrate(posterior, data, unpack=unpack, **options)
    b = errbar.calibrate(expected, [(x, y)], **options)
    assert a.temperature == b.temperature
    a = errbar.outlier_scores(posterior, data, unpack=unpack, samples=50)
    assert torch.equal(a.label_suspicion, errbar.outlier_scores(expected, [(x, y)], samples=50).label_suspicion)
    by = errbar.rank_outliers(posterior, data, unpack=unpack, samples=50, by="label_suspicion")
    assert sorted(by.tolist()) == list(range(30))


def test_labels_may_be_numpy_arrays_and_lists() -> None:
    x, y = draw(10, 4), labels()
    expected = errbar.fit(mlp(), [(x, y)], last_layers=1).log_evidence()
    for form in (y.numpy(), y.tolist(), y.int(), y.byte()):
        assert errbar.fit(mlp(), [(x, form)], last_layers=1).log_evidence() == expected


def test_a_posterior_moves_to_where_it_is() -> None:
    model, x = mlp(), draw(30, 4)
    batch = (x, plausible_labels(model, x))
    posterior = errbar.calibrate(errbar.fit(model, [batch], last_layers=1), [batch], fit="temperature", samples=20)
    for device in ("cpu", torch.device("cpu")):
        moved = posterior.to(device)
        assert moved.model is posterior.model
        assert (moved.temperature, moved.covariance_scale) == (posterior.temperature, posterior.covariance_scale)
        assert torch.equal(moved.predict(x).pmf, posterior.predict(x).pmf)
        assert torch.equal(moved.update([x]).covariance(), posterior.update([x]).covariance())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_results_live_on_the_device_of_the_model(dtype: torch.dtype) -> None:
    model, x, y = mlp(dtype=dtype), draw(10, 4, dtype=dtype), labels()
    here = errbar.fit(model, [(x, y)], last_layers=2)
    there = errbar.fit(copy.deepcopy(model).cuda(), [(x, y)], last_layers=2)
    tolerance = {torch.bfloat16: 0.1, torch.float32: 1e-4, torch.float64: 1e-8}[dtype]
    prediction = there.predict(x)
    for tensor in (prediction.pmf, prediction.covariance, prediction.risk(0.1), there.logits(x).covariance):
        assert tensor.is_cuda
    assert_close(prediction.pmf.cpu(), here.predict(x).pmf, tolerance)
    assert_close(there.to("cpu").predict(x).pmf, here.predict(x).pmf, tolerance)
    assert_close(here.to("cuda").predict(x).pmf.cpu(), here.predict(x).pmf, tolerance)
    assert_close(
        errbar.fuse_frames(there.joint_logits(x[:2])).mean.cpu(),
        errbar.fuse_frames(here.joint_logits(x[:2])).mean,
        tolerance * 10,
    )
