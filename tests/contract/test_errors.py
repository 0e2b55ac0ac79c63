"""Every mistake a user can make has a type and a sentence; the sentences are tested."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import errbar
from errbar import Prior, metrics

NAN, INFINITY = float("nan"), float("inf")


def network(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def inputs(count: int = 12, features: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count: int = 12, classes: int = 3, seed: int = 2) -> Tensor:
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def posterior() -> errbar.Posterior:
    return errbar.fit(network(), [(inputs(), labels())], last_layers=2)


class Returning(nn.Module):
    """A linear layer whose output is put through `change`."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=torch.float64)
        self.change = change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.linear(x))


# ------------------------------------------------------------------------------------------------ the tree itself


def test_every_error_is_an_errbar_error_with_a_docstring() -> None:
    raised = [value for name, value in vars(errbar).items() if name.endswith("Error")]
    assert len(raised) > 10
    for error in raised:
        assert issubclass(error, errbar.ErrbarError)
        assert inspect.getdoc(error)


def test_errors_carry_the_arguments_that_they_write_out_also_to_other_processes() -> None:
    for name in [name for name in vars(errbar) if name.endswith("Error")]:
        error = getattr(errbar, name)("Use precision='float64'.", arguments={"precision": "float64"})
        copied = pickle.loads(pickle.dumps(error))
        assert type(copied) is type(error)
        assert (str(copied), copied.arguments) == ("Use precision='float64'.", {"precision": "float64"})
        assert getattr(errbar, name)("Something else.").arguments == {}


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errbar.ArgumentError, ValueError),
        (errbar.SelectionError, errbar.ArgumentError),
        (errbar.DataError, ValueError),
        (errbar.LabelError, errbar.DataError),
        (errbar.ModelError, ValueError),
        (errbar.WeightsChangedError, errbar.ModelError),
        (errbar.SingularCovarianceError, errbar.CovarianceError),
        (errbar.SizeError, MemoryError),
        (errbar.MissingExtraError, ImportError),
    ],
)
def test_errors_are_also_what_generic_handlers_expect(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


# ------------------------------------------------------------------------------------------------ data and inputs


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_inputs_that_are_not_finite(posterior: errbar.Posterior, bad: float) -> None:
    x = inputs()
    x[3, 1] = bad
    for call in (
        lambda: errbar.collect(network(), [x], last_layers=1),
        lambda: errbar.collect(network(), [inputs(), x], last_layers=1),
        lambda: posterior.predict(x),
        lambda: posterior.logits(x),
        lambda: posterior.joint_logits(x),
        lambda: posterior.predict_by_parameters(x, samples=2),
        lambda: posterior.update([x]),
        lambda: posterior.forget([x]),
        lambda: errbar.calibrate(posterior, [(x, labels())]),
        lambda: errbar.outlier_scores(posterior, [x]),
    ):
        with pytest.raises(errbar.DataError, match=r"NaN or infinite values; expected finite"):
            call()


@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_logits_that_are_not_finite(bad: float) -> None:
    model = network()
    with torch.no_grad():
        model[2].bias[0] = bad
    with pytest.raises(errbar.ModelError, match=r"returned NaN or infinite logits for a finite input"):
        errbar.collect(model, [inputs()], last_layers=1)


def test_logits_that_overflow_only_at_prediction() -> None:
    posterior = errbar.fit(network().half().float().half(), [inputs() / 100], last_layers=1)
    with pytest.raises(errbar.ErrbarError, match=r"NaN or infinite (logits|values)"):
        posterior.predict(inputs() * 1e6)


@pytest.mark.parametrize("data", [[], iter([]), (), torch.utils.data.TensorDataset(torch.zeros(0, 4))])
def test_empty_data(data: Any) -> None:
    with pytest.raises(errbar.DataError, match=r"data are empty: expected at least one batch"):
        errbar.collect(network(), data, last_layers=1)


def test_empty_data_after_the_fit(posterior: errbar.Posterior) -> None:
    for call in (posterior.update, posterior.forget):
        with pytest.raises(errbar.DataError, match=r"data are empty"):
            call([])
    with pytest.raises(errbar.DataError, match=r"empty: expected at least one batch"):
        errbar.calibrate(posterior, [])
    with pytest.raises(errbar.DataError, match=r"data are empty"):
        errbar.outlier_scores(posterior, [])


def test_empty_batch(posterior: errbar.Posterior) -> None:
    nothing = torch.zeros(0, 4, dtype=torch.float64)
    with pytest.raises(errbar.DataError, match=r"holds no samples; expected at least one"):
        errbar.collect(network(), [nothing], last_layers=1)
    for call in (posterior.predict, posterior.logits, posterior.joint_logits, posterior.predict_by_parameters):
        with pytest.raises(errbar.DataError, match=r"holds no samples"):
            call(nothing)


def test_a_bare_tensor_is_not_data(posterior: errbar.Posterior) -> None:
    for call in (
        lambda: errbar.collect(network(), inputs(), last_layers=1),
        lambda: errbar.fit(network(), inputs(), last_layers=1),
        lambda: posterior.update(inputs()),
        lambda: errbar.calibrate(posterior, inputs()),
        lambda: errbar.outlier_scores(posterior, inputs()),
    ):
        with pytest.raises(errbar.DataError, match=r"bare tensor of shape \(12, 4\).*For a single batch pass \[x\]"):
            call()


@pytest.mark.parametrize("make", [tuple, list])
def test_a_single_batch_is_not_data(make: Callable[[Any], Any]) -> None:
    with pytest.raises(errbar.DataError, match=r"single batch.*Pass \[batch\]"):
        errbar.collect(network(), make((inputs(), labels())), last_layers=1)


def test_a_single_mapping_is_not_data() -> None:
    with pytest.raises(errbar.DataError, match=r"single batch \(dict\).*Pass \[batch\]"):
        errbar.collect(network(), {"input": inputs()}, last_layers=1)


@pytest.mark.parametrize("data", [3, None, "train.csv", b"x", 2.5])
def test_data_of_an_unknown_kind(data: Any) -> None:
    with pytest.raises(errbar.DataError, match=r"Cannot read data of type .*expected a Dataset, a DataLoader"):
        errbar.collect(network(), data, last_layers=1)


@pytest.mark.parametrize("batch", [np.zeros((3, 4)), "x", 3, ("a", "b"), [], None])
def test_a_batch_of_an_unknown_kind(batch: Any) -> None:
    with pytest.raises(errbar.DataError, match=r"Cannot read a batch of type .*Pass unpack="):
        errbar.collect(network(), [batch], last_layers=1)


def test_a_mapping_without_tensors() -> None:
    with pytest.raises(errbar.DataError, match=r"no tensor to count its samples by.*unpack="):
        errbar.collect(network(), [{"input": "text"}], last_layers=1)


@pytest.mark.parametrize("unpack", [lambda batch: batch, lambda batch: None, lambda batch: (batch, {})])
def test_unpack_that_returns_something_else(unpack: Callable[[Any], Any]) -> None:
    with pytest.raises(errbar.DataError, match=r"unpack\(batch\) did not return \(args, kwargs, labels\)"):
        errbar.collect(network(), [inputs()], last_layers=1, unpack=unpack)


@pytest.mark.parametrize("x", [np.zeros((2, 4)), "x", None, [], ("a", inputs()), [[1.0, 2.0]]])
def test_prediction_takes_one_batch_of_a_form_that_can_be_read(posterior: errbar.Posterior, x: Any) -> None:
    for call in (posterior.predict, posterior.logits, posterior.joint_logits, posterior.predict_by_parameters):
        with pytest.raises(
            errbar.DataError, match=r"Expected one batch of inputs, a tensor or a mapping.*Pass unpack="
        ):
            call(x)


def test_a_list_of_batches_is_not_a_batch(posterior: errbar.Posterior) -> None:
    """The second would be taken for labels, and ignored."""
    for x in ([inputs(), inputs()], (inputs(), inputs()[:3]), [inputs()] * 3):
        for call in (posterior.predict, posterior.logits, posterior.joint_logits, posterior.predict_by_parameters):
            with pytest.raises(errbar.DataError, match=r"a list or a tuple is one batch.*unpack=.*pass a DataLoader"):
                call(x)


def test_only_predict_and_logits_take_loaders(posterior: errbar.Posterior) -> None:
    for data in (DataLoader(TensorDataset(inputs())), TensorDataset(inputs()), iter([inputs()])):
        for call in (posterior.joint_logits, posterior.predict_by_parameters):
            with pytest.raises(errbar.DataError, match=r"Expected one batch of inputs, got .*call this once for each"):
                call(data)
    for call in (posterior.predict, posterior.logits):
        with pytest.raises(errbar.DataError, match=r"data are empty: expected at least one batch"):
            call(iter([]))


def test_unpack_that_fails_on_a_batch(posterior: errbar.Posterior) -> None:
    unpack = {"a dict": lambda batch: ((batch["x"],), {}, None), "three": lambda batch: ((batch[2],), {}, None)}
    for function in unpack.values():
        with pytest.raises(
            errbar.DataError, match=r"unpack\(batch\) failed on a batch of type tuple of \(Tensor, Tensor"
        ):
            errbar.collect(network(), [(inputs(), labels())], last_layers=1, unpack=function)
    kept = errbar.fit(network(), [{"x": inputs()}], last_layers=1, unpack=unpack["a dict"])
    with pytest.raises(
        errbar.DataError, match=r"unpack\(batch\) failed .*batches like those of the fit, or pass unpack="
    ):
        errbar.calibrate(kept, [(inputs(), labels())])
    with pytest.raises(errbar.ArgumentError, match=r"unpack is 3; expected a function from a batch"):
        posterior.predict(inputs(), unpack=3)


def test_unpack_that_returns_a_bare_tensor() -> None:
    """Its rows would be taken for arguments."""
    with pytest.raises(errbar.DataError, match=r"did not return \(args, kwargs, labels\).*the arguments are a Tensor"):
        errbar.collect(network(), [(inputs(), labels())], last_layers=1, unpack=lambda batch: (batch[0], {}, batch[1]))


def test_an_input_without_its_batch_dimension(posterior: errbar.Posterior) -> None:
    with pytest.raises(errbar.ErrbarError, match=r"shape \(3,\) for a batch of 4"):
        posterior.predict(inputs()[0])
    with pytest.raises(errbar.ErrbarError, match=r"no tensor to count its samples by|no samples"):
        posterior.predict(torch.tensor(1.0))


def test_inputs_with_the_wrong_number_of_features(posterior: errbar.Posterior) -> None:
    """What the network itself says is kept; the type is ours, and the shape of the input is named."""
    wrong = inputs(features=7)
    for call in (
        lambda: errbar.collect(network(), [wrong], last_layers=1),
        lambda: errbar.collect(network(), [inputs(), wrong], last_layers=1),
        lambda: posterior.predict(wrong),
        lambda: posterior.joint_logits(wrong),
        lambda: posterior.predict_by_parameters(wrong, samples=2),
        lambda: posterior.update([wrong]),
        lambda: errbar.calibrate(posterior, [(wrong, labels())]),
    ):
        with pytest.raises(errbar.ErrbarError, match=r"\(12, 7\)"):
            call()


def test_integers_where_the_network_wants_numbers(posterior: errbar.Posterior) -> None:
    with pytest.raises(errbar.ErrbarError, match=r"torch\.(int64|uint8|long)"):
        posterior.predict((inputs() * 10).long())


# ---------------------------------------------------------------------------------------------------------- labels


def test_labels_that_are_missing(posterior: errbar.Posterior) -> None:
    with pytest.raises(errbar.LabelError, match=r"Labels are missing: expected batches \(x, labels\)"):
        errbar.calibrate(posterior, [inputs()])
    unlabelled = errbar.fit(network(), [inputs()], last_layers=1)
    with pytest.raises(errbar.LabelError, match=r"log_evidence needs .* had no labels"):
        unlabelled.log_evidence()
    partly = errbar.fit(network(), [(inputs(), labels()), inputs()], last_layers=1)
    with pytest.raises(errbar.LabelError, match=r"log_evidence needs"):
        partly.log_evidence()
    with pytest.raises(errbar.LabelError, match=r"log_evidence needs"):
        posterior.update([inputs()]).log_evidence()
    with pytest.raises(errbar.LabelError, match=r"label suspicion needs labels"):
        errbar.rank_outliers(posterior, [inputs()], by="label_suspicion")


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (labels() + 1, r"Labels run from 1 to 3; expected 0 to 2, because the model has 3 classes"),
        (labels() - 1, r"Labels run from -1 to 1; expected 0 to 2"),
        (labels().double(), r"Labels are torch.float64; expected integers 0 to 2"),
        (labels().double() + 0.5, r"Labels are torch.float64; expected integers"),
        (labels()[:5], r"Labels have shape \(5,\); expected \(12,\), one class number for each input"),
        (labels()[:, None], r"Labels have shape \(12, 1\); expected \(12,\)"),
        (nn.functional.one_hot(labels(), 3), r"Labels have shape \(12, 3\).*argmax\(1\)"),
        (torch.tensor(1), r"Labels have shape \(\); expected \(12,\)"),
        (["cat"] * 12, r"Labels .*expected integers"),
        ("labels", r"Labels .*expected"),
        (labels() + 1j, r"Labels are torch.complex64; expected integers"),
    ],
)
def test_labels_that_are_not_class_numbers(posterior: errbar.Posterior, y: Any, message: str) -> None:
    for call in (
        lambda: errbar.calibrate(posterior, [(inputs(), y)]),
        lambda: errbar.collect(network(), [(inputs(), y)], last_layers=1),
        lambda: errbar.outlier_scores(posterior, [(inputs(), y)]),
        lambda: metrics.nll(torch.full((12, 3), 1 / 3), y),
    ):
        with pytest.raises(errbar.LabelError, match=message):
            call()


# ------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("end", [nn.Softmax(1), nn.Sequential(nn.Softmax(1)), nn.Softmin(1), nn.Sigmoid()])
def test_a_model_that_ends_in_a_softmax(end: nn.Module) -> None:
    with pytest.raises(errbar.ModelError, match=r"ends in a S(oftmax|oftmin|igmoid) .*expected logits"):
        errbar.collect(nn.Sequential(*network(), end), [inputs()], last_layers=1)


@pytest.mark.parametrize("after", [nn.Identity(), nn.Dropout(0.1)])
def test_a_softmax_is_noticed_behind_modules_that_change_nothing(after: nn.Module) -> None:
    with pytest.raises(errbar.ModelError, match=r"ends in a Softmax"):
        errbar.collect(nn.Sequential(*network(), nn.Softmax(1), after), [inputs()], last_layers=1)


def test_a_softmax_inside_the_model_is_fine() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Softmax(1), nn.Linear(5, 3)).double()
    assert errbar.collect(model, [inputs()], last_layers=1).n_parameters == 18


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda g: torch.softmax(g, 1), "softmax"),
        (lambda g: torch.sigmoid(g), "sigmoid"),
        (lambda g: g.sigmoid_(), "sigmoid"),
        (lambda g: nn.functional.softmin(g, 1), "softmax"),
        (lambda g: nn.functional.hardsigmoid(g), "hardsigmoid"),
        (lambda g: nn.functional.logsigmoid(g), "logsigmoid"),
        (lambda g: torch.softmax(g, 1)[:, :, None].squeeze(2).clamp(1e-7), "softmax"),
        (lambda g: torch.softmax(g.float(), 1).double().contiguous(), "softmax"),
        (lambda g: torch.sigmoid(g[:, :1]), "sigmoid"),
        (lambda g: torch.cat([1 - torch.sigmoid(g[:, :1]), torch.sigmoid(g[:, :1])], 1), "sigmoid"),
        (lambda g: torch.stack([torch.softmax(g, 1), torch.softmax(2 * g, 1)]).mean(0), "softmax"),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_functions_that_make_probabilities_are_seen_in_the_graph(
    change: Callable[[Tensor], Any], kind: str, frozen: bool
) -> None:
    model = Returning(change).requires_grad_(not frozen)
    for call in (
        lambda: errbar.collect(model, [inputs()], last_layers=1),
        lambda: errbar.plan(model, inputs()),
    ):
        with pytest.raises(errbar.ModelError, match=rf"outputs come from a {kind}, .*probabilities; expected"):
            call()


@pytest.mark.parametrize(
    "change",
    [
        lambda g: 4 * torch.softmax(g, 1),  # bounded logits
        lambda g: g - torch.softmax(g, 1),
        lambda g: g * torch.sigmoid(g),  # a gate
        lambda g: torch.cat([g, torch.sigmoid(g)], 1),
    ],
)
def test_logits_that_a_softmax_takes_part_in_are_logits(change: Callable[[Tensor], Any]) -> None:
    assert errbar.collect(Returning(change), [inputs()], last_layers=1).n_samples == 12


@pytest.mark.parametrize("name", ["relu", "tanh", "exp"])
def test_outputs_that_are_hardly_logits_are_warned_about(name: str) -> None:
    with pytest.warns(UserWarning, match=rf"outputs come from {name}, which is unusual for logits"):
        errbar.collect(Returning(getattr(torch, name)), [inputs()], last_layers=1)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(*network(), nn.LogSoftmax(1)),
        Returning(lambda g: torch.log_softmax(g, 1)),
        Returning(lambda g: torch.log(torch.softmax(g, 1) + 1e-12)),
    ],
)
def test_eta_depends_on_the_gauge_that_a_log_softmax_takes_away(model: nn.Module) -> None:
    for call in (
        lambda: errbar.fit(model, [inputs()], last_layers=1, fisher="eta"),
        lambda: errbar.plan(model, inputs(), fisher="eta"),
    ):
        with pytest.raises(errbar.ModelError, match=r"ends in a log-softmax, and fisher='eta' depends.*fisher='ggn'"):
            call()


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g - g.mean(0),
        lambda g: torch.log_softmax(g, 0),
        lambda g: nn.functional.batch_norm(g, None, None, training=True),
        lambda g: torch.softmax(g @ g.T, 1) @ g,
        lambda g: g - 0.01 * g.mean(0),
        lambda g: g.flip(0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("structure", ["dense", "lowrank"])
def test_a_model_that_mixes_samples(change: Callable[[Tensor], Any], dtype: torch.dtype, structure: str) -> None:
    model = Returning(change).to(dtype)
    with torch.no_grad():
        model.linear.weight.copy_(torch.linspace(-1, 1, 12).reshape(3, 4))
    for count in (4, 12, 31):
        with pytest.raises(errbar.ModelError, match=r"mixes samples: .*one input's result depends on the others"):
            errbar.collect(model, [inputs(count)], last_layers=1, structure=structure)
    with pytest.raises(errbar.ModelError, match=r"mixes samples"):
        errbar.plan(model, inputs())


def test_a_model_that_mixes_samples_in_bfloat16() -> None:
    model = Returning(lambda g: g - g.mean(0)).bfloat16()
    with torch.no_grad():
        model.linear.weight.copy_(torch.linspace(-1, 1, 12).reshape(3, 4))
    with pytest.raises(errbar.ModelError, match=r"mixes samples"):
        errbar.collect(model, [inputs()], last_layers=1)


@pytest.mark.parametrize("change", [lambda g: g.detach(), lambda g: g.argmax(1)[:, None].double().expand(-1, 3)])
def test_logits_without_a_derivative(change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(errbar.ModelError, match=r"logits do not depend on any parameter.*detach\(\) its outputs"):
        errbar.collect(Returning(change), [inputs()], last_layers=1)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpoints_that_cannot_be_differentiated() -> None:
    def again(g: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(torch.sin, g, use_reentrant=True)

    with pytest.raises(errbar.ModelError, match=r"cannot be differentiated by its parameters.*use_reentrant=False"):
        errbar.collect(Returning(again), [inputs()], last_layers=1)


def test_weights_without_numbers() -> None:
    model = network()
    model[0].to("meta")
    for wrong in (model, network().to("meta")):
        with pytest.raises(errbar.ModelError, match=r"meta device, which hold no numbers.*load_state_dict"):
            errbar.collect(wrong, [inputs()], last_layers=1)


def test_what_torch_export_makes_is_no_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about itself
        program = torch.export.export(network(), (inputs(),))
        unflattened = torch.export.unflatten(program)
    with pytest.raises(errbar.ArgumentError, match=r"came out of torch\.export.*Pass the module that was exported"):
        errbar.collect(program, [inputs()], last_layers=1)
    for made in (program.module(), unflattened, nn.Sequential(program.module())):
        with pytest.raises(errbar.ModelError, match=r"came out of torch\.export.*Pass the module that was exported"):
            errbar.collect(made, [inputs()], last_layers=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g[:, :, None], r"shape \(12, 3, 1\) for a batch of 12; expected .*\(12, classes\)"),
        (lambda g: g[:, 0], r"shape \(12,\) for a batch of 12"),
        (lambda g: g[:5], r"shape \(5, 3\) for a batch of 12"),
        (lambda g: g[:, :0], r"shape \(12, 0\) for a batch of 12"),
        (lambda g: (g, g), r"returned tuple of 2; expected logits of shape \(batch, classes\)"),
        (lambda g: {"output": g}, r"returned dict with the keys 'output'; expected logits.*output="),
        (lambda g: None, r"returned NoneType; expected logits"),
        (lambda g: g.argmax(1, keepdim=True), r"torch.int64 tensor of shape \(12, 1\).*floating-point"),
    ],
)
def test_an_output_that_is_not_logits(change: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(errbar.ModelError, match=message):
        errbar.collect(Returning(change), [inputs()], last_layers=1)


@pytest.mark.parametrize("model", [None, lambda x: x, "model", nn.Linear])
def test_a_model_that_is_not_a_module(model: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"model is a .*; expected a torch.nn.Module"):
        errbar.collect(model, [inputs()], last_layers=1)


def test_a_model_without_parameters() -> None:
    with pytest.raises(errbar.ModelError, match=r"no parameters; expected a trained classifier"):
        errbar.collect(nn.Flatten(), [inputs()], parameters="all")


def test_a_lazy_model_that_never_ran() -> None:
    with pytest.raises(errbar.ModelError, match=r"uninitiali[sz]ed"):
        errbar.collect(nn.LazyLinear(3), [inputs().float()], last_layers=1)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(5, track_running_stats=False)])
def test_batch_norm_without_running_statistics(norm: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3)).double()
    with pytest.raises(
        errbar.ModelError, match=r"'1' is a BatchNorm1d without running statistics.*track_running_stats"
    ):
        errbar.collect(model, [inputs()], last_layers=1)


def test_a_model_that_draws_random_numbers_in_eval_mode() -> None:
    model = Returning(lambda g: nn.functional.dropout(g, 0.5, training=True))
    with pytest.raises(errbar.ModelError, match=r"draws random numbers in eval mode"):
        errbar.collect(model, [inputs()], last_layers=1)


# -------------------------------------------------------------------------------------------- selection, options


def test_both_or_neither_selection() -> None:
    with pytest.raises(errbar.SelectionError, match=r"exactly one of last_layers= and parameters=, got both"):
        errbar.collect(network(), [inputs()], last_layers=1, parameters="all")
    with pytest.raises(errbar.SelectionError, match=r"exactly one of last_layers= and parameters=, got neither"):
        errbar.collect(network(), [inputs()])
    with pytest.raises(errbar.SelectionError, match=r"got neither"):
        errbar.fit(network(), [inputs()])


@pytest.mark.parametrize(
    ("last_layers", "message"),
    [
        (0, r"last_layers is 0; expected 1 or more"),
        (-2, r"last_layers is -2; expected 1 or more"),
        (3, r"last_layers is 3, but only 2 layers with parameters ran: 0, 2. Expected 1 to 2"),
        (1.0, r"last_layers is 1.0; expected a whole number"),
        (True, r"last_layers is True; expected a whole number"),
        ("1", r"last_layers is '1'; expected a whole number"),
    ],
)
def test_a_number_of_layers_that_is_not_one(last_layers: Any, message: str) -> None:
    with pytest.raises(errbar.SelectionError, match=message):
        errbar.collect(network(), [inputs()], last_layers=last_layers)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 5, dtype=torch.float64)
        self.classifier = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.backbone(x)))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("clasifier", r"No parameter is called 'clasifier' or lies in it. Did you mean classifier"),
        (["classifier.weigth"], r"Did you mean classifier.weight"),
        (["backbone", "head"], r"No parameter is called 'head'"),
        ("class", r"No parameter is called 'class'"),
        ("zzz", r"There are backbone.weight, backbone.bias, classifier.weight, classifier.bias"),
        ([], r"parameters is empty"),
        ("", r"parameters is empty|No parameter is called ''"),
        ([3], r"No parameter is called '3'|expected .*names"),
        (3, r"parameters is 3; expected"),
    ],
)
def test_parameters_that_do_not_exist(parameters: Any, message: str) -> None:
    with pytest.raises(errbar.SelectionError, match=message):
        errbar.collect(Named(), [inputs()], parameters=parameters)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("fisher", "empirical", r"fisher is 'empirical'; expected 'ggn' .*, 'eta' .* or 'sampled'"),
        ("fisher", None, r"fisher is None; expected 'ggn'"),
        ("structure", "banana", r"structure is 'banana'; expected 'dense'"),
        ("structure", None, r"structure is None; expected 'dense'"),
        ("precision", "float16", r"precision is 'float16'; expected None or 'float64'"),
        ("precision", torch.float32, r"precision is torch.float32; expected None or 'float64'"),
    ],
)
def test_options_that_do_not_exist(option: str, value: Any, message: str) -> None:
    with pytest.raises(errbar.ArgumentError, match=message):
        errbar.collect(network(), [inputs()], last_layers=1, **{option: value})
    with pytest.raises(errbar.ArgumentError, match=message):
        errbar.fit(network(), [inputs()], last_layers=1, **{option: value})


def test_sizes_that_cannot_be_held_are_refused_before_allocation() -> None:
    model = nn.Linear(999, 200)  # 200 000 parameters: a matrix of 298 GiB
    with pytest.raises(errbar.SizeError, match=r"200,000 parameters needs [\d,.]+ GiB on cpu, and [\d.,]+ .iB are ava"):
        errbar.fit(model, [torch.zeros(2, 999)], parameters="all")
    with pytest.raises(MemoryError, match=r"what fits is structure='kron' \([\d.]+ MiB\)\."):
        errbar.collect(model, [torch.zeros(2, 999)], last_layers=1)


@pytest.mark.parametrize(
    "call",
    [
        lambda p: p.predict(inputs(), samples=10**13),
        lambda p: p.sample_parameters(10**12),
        lambda p: p.logits(inputs()).predict(samples=10**13),
        lambda p: p.predict_by_parameters(inputs(), samples=10**12),
    ],
)
def test_numbers_of_samples_that_cannot_be_held_are_refused(
    posterior: errbar.Posterior, call: Callable[[errbar.Posterior], Any]
) -> None:
    with pytest.raises(errbar.SizeError, match=r"samples .*needs [\d,.]+ .iB"):
        call(posterior)


# ------------------------------------------------------------------------------------------------ changed weights


def step(model: nn.Sequential) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(inputs()).sum().backward()
    optimiser.step()


def replace_parameter(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def replace_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(5, 3, dtype=torch.float64)


def add_module(model: nn.Sequential) -> None:
    model.append(nn.Linear(3, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "change",
    [
        step,
        lambda model: model.load_state_dict(network(seed=5).state_dict()),
        lambda model: model.load_state_dict(network(seed=5).state_dict(), assign=True),
        replace_parameter,
        replace_module,
        add_module,
        lambda model: nn.init.zeros_(model[2].bias),
        lambda model: model.float(),
    ],
    ids=["step", "load", "assign", "parameter", "module", "append", "init", "dtype"],
)
def test_weights_that_changed_since_the_fit(change: Callable[[nn.Module], Any]) -> None:
    model = network()
    posterior = errbar.fit(model, [(inputs(), labels())], last_layers=1)
    change(model)
    for call in (
        lambda: posterior.predict(inputs()),
        lambda: posterior.logits(inputs()),
        lambda: posterior.joint_logits(inputs()),
        lambda: posterior.predict_by_parameters(inputs(), samples=2),
        lambda: posterior.sample_parameters(2),
        lambda: posterior.update([inputs()]),
        lambda: posterior.forget([inputs()]),
        lambda: posterior.log_evidence(),
        lambda: errbar.calibrate(posterior, [(inputs(), labels())]),
        lambda: errbar.outlier_scores(posterior, [inputs()]),
    ):
        with pytest.raises(errbar.WeightsChangedError, match=r"weights changed since the fit"):
            call()


def test_a_posterior_does_not_follow_weights_that_changed() -> None:
    model = network()
    posterior = errbar.fit(model, [inputs()], last_layers=1)
    step(model)
    with pytest.raises(errbar.WeightsChangedError, match=r"weights changed since the fit.*Fit again"):
        posterior.to("cpu")


def test_running_statistics_that_changed_since_the_fit() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    posterior = errbar.fit(model, [inputs()], last_layers=1)
    posterior.predict(inputs())
    model.eval()(inputs())
    posterior.predict(inputs())
    model.train()(inputs())
    with pytest.raises(errbar.WeightsChangedError, match=r"Fit again, or fit on a copy"):
        posterior.predict(inputs())


# ----------------------------------------------------------------------------------------------------- the prior


@pytest.mark.parametrize("value", [0, -1.0, NAN, INFINITY, -INFINITY, None, "six", True, [1.0], 1j])
def test_a_prior_that_is_not_positive_and_finite(value: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"prior precision is .*; expected a positive finite number"):
        Prior(value)
    with pytest.raises(errbar.ArgumentError, match=r"prior precision of 'head' is .*; expected a positive finite"):
        Prior({"head": value})


@pytest.mark.parametrize(
    "value", [torch.tensor([1.0, 0.0]), torch.tensor([1.0, -1.0]), torch.tensor([NAN, 1.0]), torch.ones(2, 2)]
)
def test_a_prior_tensor_that_is_not_a_vector_of_positive_numbers(value: Tensor) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"not a vector of positive finite numbers"):
        Prior(value)


@pytest.mark.parametrize("pair", [(0.0, 10), (-1e-4, 10), (1e-4, 0), (NAN, 10), (1e-4, INFINITY)])
def test_a_weight_decay_that_makes_no_prior(pair: tuple[float, int]) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"(weight decay|number of samples).*expected a positive finite"):
        Prior.from_weight_decay(*pair)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (Prior(torch.ones(7)), r"The prior has 7 precisions; expected 18, one for each selected parameter"),
        (Prior({"head": 1.0}), r"The prior names 'head', which no selected parameter lies in.*classifier.weight"),
        (Prior({"backbone": 1.0}), r"names 'backbone', which no selected parameter lies in"),
        (Prior({"classifier.weight": 1.0}), r"no precision for classifier.bias; expected one for each"),
        (Prior({}), r"no precision for classifier.weight, classifier.bias"),
        (3.0, r"prior is 3.0; expected errbar.Prior"),
        ("strong", r"prior is 'strong'; expected errbar.Prior"),
    ],
)
def test_a_prior_that_does_not_fit_the_parameters(prior: Any, message: str) -> None:
    with pytest.raises(errbar.ArgumentError, match=message):
        errbar.fit(Named(), [inputs()], last_layers=1, prior=prior)
    information = errbar.collect(Named(), [inputs()], last_layers=1)
    with pytest.raises(errbar.ArgumentError, match=message):
        errbar.condition(information, prior)
    with pytest.raises(errbar.ArgumentError, match=message):
        errbar.condition(information, Prior()).with_prior(prior)


def test_condition_takes_information(posterior: errbar.Posterior) -> None:
    with pytest.raises(
        errbar.ArgumentError, match=r"Expected Information, as errbar.collect returns it, got Posterior"
    ):
        errbar.condition(posterior, Prior())  # type: ignore[arg-type]
    with pytest.raises(errbar.MismatchError, match=r"other weights than those of the fit"):
        errbar.condition(posterior.information, Prior(), model=network(seed=9))


# ---------------------------------------------------------------------------------------------------- information


def test_forgetting_more_samples_than_were_seen(posterior: errbar.Posterior) -> None:
    with pytest.raises(errbar.ForgetError, match=r"Cannot forget 24 samples: the information holds only 12"):
        posterior.forget([inputs(24)])
    with pytest.raises(errbar.ForgetError, match=r"Cannot forget 12 samples: the information holds only 6"):
        posterior.information * 0.5 - posterior.information


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_forgetting_data_that_were_never_seen(dtype: torch.dtype) -> None:
    posterior = errbar.fit(network(dtype), [inputs()], last_layers=2)
    for other in (inputs(seed=77)[:6], inputs(seed=78)[:1], inputs() * 3):
        with pytest.raises(errbar.ForgetError, match=r"would leave negative information.*not among the data seen"):
            posterior.forget([other])


def test_combining_information_that_does_not_belong_together() -> None:
    model = network()
    information = errbar.collect(model, [inputs()], last_layers=1)
    for other, message in (
        (errbar.collect(model, [inputs()], last_layers=1, fisher="eta"), r"different fisher.*ggn and eta"),
        (errbar.collect(model, [inputs()], last_layers=2), r"different parameters cannot be combined"),
        (errbar.collect(network(seed=4), [inputs()], last_layers=1), r"different weights \(fingerprint\)"),
        (3, r"Cannot combine Information with int"),
        (None, r"Cannot combine Information with NoneType"),
    ):
        with pytest.raises(errbar.MismatchError, match=message):
            information + other  # type: ignore[operator]
        with pytest.raises(errbar.MismatchError, match=message):
            information - other  # type: ignore[operator]
    twin = errbar.collect(copy.deepcopy(model), [inputs()], last_layers=1)
    assert (information + twin).n_samples == 24


@pytest.mark.parametrize("factor", [-1.0, NAN, INFINITY])
def test_a_discount_that_is_not_a_positive_number(posterior: errbar.Posterior, factor: float) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"The discount is .*; expected a finite number of zero or more"):
        posterior.information * factor


# --------------------------------------------------------------------------------------------- logits and fusion


def covariance_with(change: Callable[[Tensor], Any]) -> Any:
    P = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1)
    return change(P)


def not_symmetric(P: Tensor) -> Tensor:
    P[1, 0, 1] = 0.5
    return P


def not_positive(P: Tensor) -> Tensor:
    P[0, 2, 2] = -0.1
    return P


def with_nan(P: Tensor) -> Tensor:
    P[0, 0, 0] = NAN
    return P


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (not_symmetric, errbar.CovarianceError, r"covariance of the logits is not symmetric: .*up to 0.5"),
        (not_positive, errbar.CovarianceError, r"not positive semi-definite: its smallest eigenvalue is -0.1"),
        (with_nan, errbar.CovarianceError, r"holds NaN or infinite values"),
        (lambda P: P * INFINITY, errbar.CovarianceError, r"holds NaN or infinite values"),
        (lambda P: P[0], errbar.MismatchError, r"covariance has shape \(3, 3\); expected \(2, 3, 3\)"),
        (lambda P: P[:, :2, :2], errbar.MismatchError, r"covariance has shape \(2, 2, 2\); expected \(2, 3, 3\)"),
        (lambda P: P.float(), errbar.MismatchError, r"covariance is torch.float32 .* mean torch.float64"),
        (lambda P: P.numpy(), errbar.MismatchError, r"covariance has shape ndarray; expected \(2, 3, 3\)"),
    ],
)
def test_a_covariance_that_is_not_one(change: Callable[[Tensor], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        errbar.LogitGaussian(torch.zeros(2, 3, dtype=torch.float64), covariance_with(change))


@pytest.mark.parametrize(
    ("mean", "error", "message"),
    [
        (torch.zeros(3), errbar.MismatchError, r"mean has shape \(3,\); expected \(inputs, classes\)"),
        (torch.zeros(2, 1), errbar.MismatchError, r"mean has shape \(2, 1\).*two or more classes"),
        (
            torch.zeros(2, 3, dtype=torch.long),
            errbar.MismatchError,
            r"mean is torch.int64; expected float32 or float64",
        ),
        (torch.zeros(2, 3, dtype=torch.half), errbar.MismatchError, r"mean is torch.float16; expected float32"),
        (torch.full((2, 3), NAN), errbar.CovarianceError, r"mean holds NaN or infinite values"),
        ([[0.0, 0.0, 0.0]], errbar.MismatchError, r"mean has shape list"),
    ],
)
def test_a_mean_that_is_not_one(mean: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        errbar.LogitGaussian(mean, torch.eye(3).repeat(2, 1, 1))


def test_a_joint_covariance_that_is_not_one() -> None:
    mean = torch.zeros(2, 3)
    with pytest.raises(errbar.MismatchError, match=r"covariance has shape \(6, 6\); expected \(2, 3, 2, 3\)"):
        errbar.JointLogits(mean, torch.eye(6))
    lopsided = torch.eye(6)
    lopsided[0, 5] = 0.9
    with pytest.raises(errbar.CovarianceError, match=r"joint covariance of the frames is not symmetric"):
        errbar.JointLogits(mean, lopsided.reshape(2, 3, 2, 3))
    with pytest.raises(errbar.CovarianceError, match=r"joint covariance of the frames is not positive semi-definite"):
        errbar.JointLogits(mean, -torch.eye(6).reshape(2, 3, 2, 3))


@pytest.mark.parametrize("value", [0, -1.0, NAN, INFINITY, "hot", None])
def test_a_temperature_that_is_not_positive(posterior: errbar.Posterior, value: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"temperature is .*; expected a positive finite number"):
        posterior.logits(inputs()).tempered(value)


@pytest.mark.parametrize("value", [-1e-9, NAN, INFINITY, "wide", None])
def test_a_covariance_scale_that_is_negative(posterior: errbar.Posterior, value: Any) -> None:
    with pytest.raises(
        errbar.ArgumentError, match=r"covariance scale is .*; expected zero or a positive finite number"
    ):
        posterior.logits(inputs()).scaled(value)


@pytest.mark.parametrize("index", [0, -1, None, (0, 1), [0, 1]])
def test_gaussians_are_indexed_by_slices(posterior: errbar.Posterior, index: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"indexed by slices, got .*gaussian\[i : i \+ 1\]"):
        posterior.logits(inputs())[index]


def gaussian(rows: int = 2, classes: int = 3) -> errbar.LogitGaussian:
    return errbar.LogitGaussian(torch.zeros(rows, classes), torch.eye(classes).repeat(rows, 1, 1))


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ([], errbar.ArgumentError, r"nothing to fuse; expected at least one LogitGaussian"),
        ([gaussian(), gaussian(classes=4)], errbar.MismatchError, r"Cannot fuse classifiers with 3 and 4 classes"),
        ([gaussian(), gaussian(rows=5)], errbar.MismatchError, r"Cannot fuse 2 inputs with 5; expected row i"),
        (
            [gaussian(), torch.zeros(2, 3)],
            errbar.ArgumentError,
            r"Item 1 to fuse is a Tensor; expected a LogitGaussian",
        ),
        ([gaussian().predict()], errbar.ArgumentError, r"Item 0 to fuse is a Prediction; expected a LogitGaussian"),
        (gaussian(), errbar.ArgumentError, r"LogitGaussian"),
        (None, errbar.ArgumentError, r"expected .*LogitGaussian"),
        (
            [gaussian(), gaussian().scaled(0.0)],
            errbar.SingularCovarianceError,
            r"covariance of classifier 1 is singular.*cannot be weighed",
        ),
    ],
)
def test_what_cannot_be_fused(sources: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        errbar.fuse(sources)


def test_what_cannot_be_fused_as_frames(posterior: errbar.Posterior) -> None:
    for wrong in (posterior.logits(inputs()), [gaussian()], None):
        with pytest.raises(errbar.ArgumentError, match=r"Expected JointLogits from posterior.joint_logits"):
            errbar.fuse_frames(wrong)  # type: ignore[arg-type]
    repeated = posterior.joint_logits(inputs()[[0, 0]])
    with pytest.raises(errbar.SingularCovarianceError, match=r"covariance R between the frames is singular"):
        errbar.fuse_frames(repeated, raw=True)
    widths = torch.tensor([1.0, 1e-16, 4.0], dtype=torch.float64)
    one_is_certain = torch.einsum("ij,mn->imjn", torch.diag(widths), torch.eye(3, dtype=torch.float64))
    with pytest.raises(errbar.SingularCovarianceError, match=r"contrasts of frame 1 have a variance of 1e-16.*largest"):
        errbar.fuse_frames(errbar.JointLogits(torch.zeros(3, 3, dtype=torch.float64), one_is_certain))
    certain = errbar.JointLogits(repeated.mean, torch.zeros_like(repeated.covariance))
    with pytest.raises(errbar.SingularCovarianceError, match=r"cannot be weighed against each other"):
        errbar.fuse_frames(certain)


# ------------------------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize("seed", [-1, 1.5, "0", None, True, 2**63])
def test_a_seed_that_is_not_one(posterior: errbar.Posterior, seed: Any) -> None:
    for call in (
        lambda: posterior.predict(inputs(), seed=seed),
        lambda: posterior.sample_parameters(2, seed=seed),
        lambda: posterior.predict_by_parameters(inputs(), samples=2, seed=seed),
        lambda: errbar.calibrate(posterior, [(inputs(), labels())], seed=seed),
    ):
        with pytest.raises(errbar.ArgumentError, match=r"seed is .*; expected a whole number of zero or more"):
            call()


@pytest.mark.parametrize("samples", [0, -5, 10.0, "many", None, True])
def test_a_number_of_samples_that_is_not_one(posterior: errbar.Posterior, samples: Any) -> None:
    for call in (
        lambda: posterior.predict(inputs(), samples=samples),
        lambda: posterior.logits(inputs()).predict(samples=samples),
        lambda: posterior.sample_parameters(samples),
        lambda: posterior.predict_by_parameters(inputs(), samples=samples),
        lambda: errbar.calibrate(posterior, [(inputs(), labels())], samples=samples),
    ):
        with pytest.raises(errbar.ArgumentError, match=r"samples is .*; expected a whole number of one or more"):
            call()


@pytest.mark.parametrize("number", [np.int64(7), np.int32(7)])
def test_numpy_integers_are_whole_numbers(posterior: errbar.Posterior, number: Any) -> None:
    assert torch.equal(posterior.predict(inputs(), 50, number).pmf, posterior.predict(inputs(), 50, 7).pmf)
    assert len(posterior.predict(inputs(), number).samples()[0]) == 7
    assert errbar.collect(network(), [inputs()], last_layers=np.int64(1)).n_parameters == 18


@pytest.mark.parametrize("level", [0, 1, -0.5, 95, NAN, "most", None])
def test_a_level_that_is_not_between_zero_and_one(posterior: errbar.Posterior, level: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"level of the interval is .*; expected a number between 0 and 1"):
        posterior.predict(inputs()).interval(level)


@pytest.mark.parametrize(
    "threshold", [-0.1, 1.1, NAN, [0.1, 0.2], torch.zeros(3, 3), torch.tensor([0.1, 0.2, 2.0]), "high", None]
)
def test_a_threshold_that_is_not_a_probability(posterior: errbar.Posterior, threshold: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"(?s)risk threshold is .*one for each of the 3 classes"):
        posterior.predict(inputs()).risk(threshold)


# ------------------------------------------------------------------------------------- calibration and outliers


@pytest.mark.parametrize("objective", ["accuracy", None, 3, ["nll"]])
def test_an_objective_that_does_not_exist(posterior: errbar.Posterior, objective: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"objective is .*; expected 'nll', 'brier', 'ece'"):
        errbar.calibrate(posterior, [(inputs(), labels())], objective=objective)


@pytest.mark.parametrize("fit", [(), ("T",), "prior", ("temperature", "bias"), None, 3])
def test_nothing_that_can_be_fitted(posterior: errbar.Posterior, fit: Any) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"fit is .*; expected one or more of 'temperature', 'cov"):
        errbar.calibrate(posterior, [(inputs(), labels())], fit=fit)


@pytest.mark.parametrize("function", [errbar.calibrate, errbar.outlier_scores])
def test_a_model_in_place_of_its_posterior(function: Callable[..., Any]) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"Posterior"):
        function(network(), [(inputs(), labels())])


def test_a_score_that_does_not_exist(posterior: errbar.Posterior) -> None:
    with pytest.raises(errbar.ArgumentError, match=r"by is 'entropy'; expected 'mutual_information'"):
        errbar.rank_outliers(posterior, [inputs()], by="entropy")


# -------------------------------------------------------------------------------------------------------- metrics

SCORES = [
    metrics.accuracy,
    metrics.log_likelihood,
    metrics.nll,
    metrics.brier,
    metrics.ece,
    metrics.ece_literal,
    metrics.reliability,
    metrics.aurc,
]


@pytest.mark.parametrize("score", SCORES)
def test_logits_in_place_of_probabilities(score: Callable[..., Any]) -> None:
    for wrong in (torch.randn(4, 3), torch.rand(4, 3) + 1, torch.full((4, 3), NAN), torch.log(torch.ones(4, 3) / 3)):
        with pytest.raises(errbar.DataError, match=r"sum to one in each row; pass probabilities, not logits"):
            score(wrong, [0, 1, 2, 0])


@pytest.mark.parametrize("score", SCORES)
def test_probabilities_of_the_wrong_shape(score: Callable[..., Any]) -> None:
    for shape in ((3,), (0, 3), (4, 1), (2, 2, 2)):
        with pytest.raises(
            errbar.DataError, match=rf"PMFs have shape {re.escape(str(shape))}; expected \(inputs, clas"
        ):
            score(torch.ones(shape), [0, 1])


@pytest.mark.parametrize("bins", [0, -1, 2.0, True, None])
def test_bins_that_are_not_a_number(bins: Any) -> None:
    for score in (metrics.ece, metrics.ece_literal, metrics.reliability):
        with pytest.raises(errbar.ArgumentError, match=r"bins is .*; expected a whole number of one or more"):
            score(torch.full((2, 2), 0.5), [0, 1], bins=bins)


def test_auroc_of_one_kind() -> None:
    with pytest.raises(errbar.LabelError, match=r"There are 3 positives and 0 negatives; expected some of each"):
        metrics.auroc([0.1, 0.2, 0.3], [True, True, True])
    with pytest.raises(errbar.LabelError, match=r"There are 0 positives and 0 negatives"):
        metrics.auroc([], [])
    with pytest.raises(errbar.DataError, match=r"Scores of shape \(2,\) and flags of shape \(3,\)"):
        metrics.auroc([0.1, 0.2], [True, False, True])
    with pytest.raises(errbar.DataError, match=r"Scores hold NaN"):
        metrics.auroc([math.nan, 0.2], [True, False])
