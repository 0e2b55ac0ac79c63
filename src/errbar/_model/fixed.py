"""A network whose weights are constants: what is computed with it keeps the graph that leads to its inputs."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from errbar._base.checks import Checks
from errbar._model.batch import Batch
from errbar._model.network import Network, replicate
from errbar._model.positions import HeadNetwork, PositionsNetwork
from errbar.errors import ArgumentError


class FixedNetwork(Network):
    """The same network for derivatives with respect to its inputs.

    Nothing leads to the weights: `backward` on a result would otherwise leave gradients in the user's model.
    """

    keeps_graph = True

    def __init__(self, network: Network) -> None:
        self.__dict__.update(network.__dict__)
        self._local = threading.local()

    def replica(self) -> nn.Module:
        replica: nn.Module | None = getattr(self._local, "replica", None)
        if replica is None:
            replica = self._local.replica = _with_constants(replicate(self.module).eval())
        return replica

    def prepare(self, batch: Batch, checks: Checks) -> Batch:
        """As for any network, without a cut between the user's tensors and those of the model."""
        prepared = super().prepare(batch, checks)
        if not any(tensor.requires_grad for tensor in prepared.tensors()):
            raise ArgumentError(
                "differentiable=True with inputs of which none requires a gradient; expected x.requires_grad_(), or an "
                "x that was computed from a tensor that does."
            )
        return prepared


class _FixedPositions(FixedNetwork, PositionsNetwork):
    """The same with many positions."""


class _FixedHead(FixedNetwork, HeadNetwork):
    """The same of the layer that returns the logits of positions, and of what makes its inputs."""

    def __init__(self, network: HeadNetwork) -> None:
        super().__init__(network)
        self.whole = _FixedPositions(network.whole)


def fixed(network: Network) -> FixedNetwork:
    """A network whose results keep the graph that leads to its inputs, looked at as before."""
    if isinstance(network, HeadNetwork):
        return _FixedHead(network)
    return _FixedPositions(network) if isinstance(network, PositionsNetwork) else FixedNetwork(network)


def _with_constants(module: nn.Module) -> nn.Module:
    """The module with parameters in the same memory that require no gradients; weights that are tied stay tied."""
    constants: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                constant = nn.Parameter(_same_memory(parameter), requires_grad=False)
                part._parameters[name] = constants.setdefault(id(parameter), constant)
    return module


def _same_memory(parameter: Tensor) -> Tensor:
    with torch.no_grad():
        return parameter.detach()
