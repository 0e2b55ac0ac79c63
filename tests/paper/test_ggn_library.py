"""`fisher="ggn"` against an independent library's generalised Gauss-Newton matrix.

The Fisher information of a categorical distribution (eq:parmaCovariance) is the generalised Gauss-Newton
matrix of the summed cross-entropy. curvlinops multiplies by it without forming Jacobians; the identity makes
it dense.
"""

from __future__ import annotations

import types

import pytest
import torch

import errbar
import oracle


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
@pytest.mark.parametrize("subset", [1, 2, "all"])
def test_information_is_the_generalised_gauss_newton_matrix(
    curvlinops: types.ModuleType, name: str, subset: int | str
) -> None:
    """Same matrix, same flat order, for the last layers and for the whole network."""
    network = oracle.NETWORKS[name]
    model = network.model(6).eval()
    x, y = network.inputs(25, 7), network.labels(25, 8)
    names = network.names(model, subset)
    parameters = [p for n, p in model.named_parameters() if n in names]
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    operator = curvlinops.GGNLinearOperator(model, loss, parameters, [(x, y)])
    expected = (operator @ torch.eye(operator.shape[1], dtype=torch.float64)).detach()

    selection = {"parameters": "all"} if subset == "all" else {"last_layers": subset}
    information = errbar.collect(model, [(x[:16], y[:16]), (x[16:], y[16:])], fisher="ggn", **selection)
    assert information.dense().shape == expected.shape
    assert float((information.dense().detach() - expected).abs().max()) <= 1e-8 * float(expected.abs().max())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["mlp", "cnn", "residual"])
def test_the_written_out_fisher_is_another_matrix(curvlinops: types.ModuleType, name: str) -> None:
    """`eta` drops the off-diagonal of diag f - f f^T; that the comparison above can tell is checked here."""
    network = oracle.NETWORKS[name]
    model = network.model(6).eval()
    x, y = network.inputs(25, 7), network.labels(25, 8)
    loss = torch.nn.CrossEntropyLoss(reduction="sum")
    operator = curvlinops.GGNLinearOperator(model, loss, list(model.parameters()), [(x, y)])
    expected = (operator @ torch.eye(operator.shape[1], dtype=torch.float64)).detach()
    information = errbar.collect(model, [(x, y)], fisher="eta", parameters="all")
    assert float((information.dense().detach() - expected).abs().max()) > 0.05 * float(expected.abs().max())
