"""What the label of an input would tell about the parameters, given those of inputs that were chosen before.

A label of x adds the information U Uᵀ with U = Jᵀ R, Λ = R Rᵀ, whatever the label turns out to be. So the entropy of
the parameters falls by ½ ln det(I + UᵀP_S U), and the recursion of eq:recUpdate_all takes P_S to that of S and x:

    P_S = P − Σ_s W_sᵀ W_s,   W_s = lower⁻¹ UᵀP_S,   lower lowerᵀ = I + UᵀP_S U.

P is that of the posterior, in its structure; the rows W_s are all that is kept of what was chosen.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base import linalg
from errbar._base.checks import Checks
from errbar._base.execution import plain_execution
from errbar._base.memory import require_memory
from errbar._curvature.fisher import Fisher, RootedWeights, fisher_form, logit_weights
from errbar._curvature.registry import structure_called
from errbar._curvature.structure import Factor
from errbar._derivative.layers import LinearLayer, SharedTerm, Spans, gathered
from errbar._derivative.layerwise import LayerwiseDerivative
from errbar._derivative.trace import class_seeds
from errbar._model.batch import Batch
from errbar._model.network import require_finite_logits
from errbar._posterior.posterior import Posterior

# The covariances of the logits, and their products with W, that are held at a time.
_COVARIANCE_BYTES = 2**27


class _EveryClass:
    """Each logit by itself, for structures that only differentiate combinations of them."""

    def __init__(self, classes: int) -> None:
        self.count = classes

    def __call__(self, batch: Batch, logits: Float[Tensor, "B M"]) -> Float[Tensor, "M B M"]:
        return class_seeds(logits)


class Conditioned:
    """P_S, by the posterior and the rows W of up to `most` inputs; the only thing here that changes."""

    def __init__(self, posterior: Posterior, most: int) -> None:
        self.posterior, self.task = posterior, posterior.information.task
        self.device = self.task.network.device
        # What was drawn for the fit is known only on average, and that is Λ itself.
        self.fisher: Fisher = fisher_form(self.task.kind, "eta" if self.task.fisher == "eta" else "ggn")
        columns = self.task.n_classes - (self.fisher == "ggn")
        n = self.task.selection.n_parameters
        require_memory(
            self.task.dtype.itemsize * most * columns * n,
            self.device,
            what=f"What {most:,} inputs tell about {n:,} parameters",
            instead="Ask for fewer inputs, fit fewer parameters, or use by='mutual_information'.",
        )
        self._rows = torch.empty(most * columns, n, dtype=self.task.dtype, device=self.device)
        self._count = 0
        parts = self.task.parts or (self.task,)
        factors: Any = posterior.factor
        self._parts = [
            (
                structure_called(part.structure),
                part,
                factor,
                Spans.of(self.task.selection, set(part.selection.names)),
            )
            for part, factor in zip(parts, factors.factors if self.task.parts else (factors,), strict=True)
        ]

    @property
    def rows(self) -> Float[Tensor, "r n"]:
        """All W_s so far."""
        return self._rows[: self._count]

    def gains(self, batch: Batch) -> Float[Tensor, "B"]:
        """½ ln det(I + UᵀP_S U) of each input, in nats, in float64."""
        classes = self.task.n_classes
        size = max(1, _COVARIANCE_BYTES // (8 * classes * (3 * classes + 2 * self._count)))
        with plain_execution(self.device):
            checks = Checks(self.device)
            prepared = self.task.network.prepare(batch, checks)
            gains = torch.cat([self._gains(part, checks) for part in prepared.parts(size)])
            checks.finish()
        return gains

    def add(self, batch: Batch) -> None:
        """Condition on one more input."""
        with plain_execution(self.device):
            prepared = self.task.network.prepare(batch, Checks(self.device))
            information_rows = self._information_rows(prepared)
            gain = covariance_times(self.posterior.factor, information_rows)
            before = self.rows.double()
            gain = gain - (information_rows @ before.T) @ before
            small = linalg.symmetric(gain @ information_rows.T)
            small.diagonal().add_(1.0)
            lower, _ = linalg.safe_cholesky(small, name="I + UᵀPU", limit=linalg.largest_jitter(self.task.dtype))
            new = linalg.solve_lower(lower, gain)
            self._rows[self._count : self._count + len(new)] = new.to(self._rows.dtype)
            self._count += len(new)

    def _gains(self, batch: Batch, checks: Checks) -> Float[Tensor, "b"]:
        mean, covariance, pushed = self._moments(batch)
        require_finite_logits(mean, checks)
        root = self._weights(mean).thin_root()
        half = root.mT @ pushed.double()
        inner = root.mT @ covariance.double() @ root - half @ half.mT
        values, _ = linalg.eigenvectors(inner, name="The covariances of the logits")
        # Rounding may leave eigenvalues below zero in directions of which nothing more is to be learnt.
        return values.clamp_min(0).log1p().sum(1) / 2

    def _moments(self, batch: Batch) -> tuple[Float[Tensor, "b M"], Float[Tensor, "b M M"], Float[Tensor, "b M r"]]:
        """ĝ, J P Jᵀ and J Wᵀ: sums over the parts of a mixed structure."""
        mean: Tensor | None = None
        covariance: Tensor | float = 0.0
        pushed: Tensor | float = 0.0
        for structure, part, factor, spans in self._parts:
            own_rows = spans.take(self.rows)
            means, covariances, products = [], [], []
            for logits, derivative in structure.derivatives(part, batch, self._seeds(part.structure)):
                in_products = derivative.to(part.dtype)
                gaussian = factor.gaussian(logits.to(part.network.dtype), in_products)
                means.append(logits)
                covariances.append(gaussian.covariance)
                products.append(pushed_along(in_products, own_rows))
                del derivative
            mean = torch.cat(means)
            covariance = covariance + torch.cat(covariances).double()
            pushed = pushed + torch.cat(products).double()
        assert mean is not None
        assert isinstance(covariance, Tensor)
        assert isinstance(pushed, Tensor)
        return mean, covariance, pushed

    def _information_rows(self, batch: Batch) -> Float[Tensor, "c n"]:
        """Uᵀ = RᵀJ of one input, in float64."""
        whole = torch.zeros(
            self.task.n_classes, self.task.selection.n_parameters, dtype=torch.float64, device=self.device
        )
        mean: Tensor | None = None
        for structure, part, _, spans in self._parts:
            ((mean, derivative),) = structure.derivatives(part, batch, self._seeds(part.structure))
            spans.put_(whole, derivative.to(part.dtype).jacobian()[0].double())
        assert mean is not None
        return self._weights(mean).thin_root()[0].mT @ whole

    def _weights(self, logits: Float[Tensor, "b M"]) -> RootedWeights:
        """Λ of what a label would be: nothing is missing."""
        return logit_weights(self.task.kind, self.fisher, logits, None)

    def _seeds(self, structure: str) -> _EveryClass | None:
        return _EveryClass(self.task.n_classes) if structure == "lowrank" else None


def covariance_times(factor: Factor, rows: Float[Tensor, "c n"]) -> Float[Tensor, "c n"]:
    """P u of each row u in float64, as A Aᵀu: A z, a draw from N(0, P), is linear in z, and autograd knows Aᵀ."""
    normal = torch.zeros_like(rows, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        draws = factor.sample(normal)
    (transposed,) = torch.autograd.grad(draws, normal, rows.to(draws.dtype))
    return factor.sample(transposed).double()


def pushed_along(derivative: Any, rows: Float[Tensor, "r n"]) -> Float[Tensor, "b M r"]:
    """J w of each input for each of r rows w, without J where a layer is used once: W h first, and then V."""
    if isinstance(derivative, LayerwiseDerivative):
        total = derivative.explicit @ derivative.rest.take(rows).to(derivative.explicit.dtype).T
        for term in derivative.terms:
            total = total + _of_shared(term, rows)
        return total
    if derivative.terms is None:
        explicit: Tensor = derivative.jacobian()
        return explicit @ rows.to(explicit.dtype).T
    parts = [_of_one_use(term.layer, term.inner, term.outer, rows) for term in derivative.terms]
    return torch.stack(parts).sum(0)


def _of_shared(term: SharedTerm, rows: Float[Tensor, "r n"]) -> Float[Tensor, "b M r"]:
    if term.is_single:
        outer = None if term.outer is None else term.outer[..., 0]
        return _of_one_use(term.layer, term.inner[:, 0], outer, rows)
    own = gathered(term.layer, rows).flatten(1).to(term.inner.dtype)
    return torch.cat([piece.flatten(2) @ own.T for _, piece in term.pieces()])


def _of_one_use(
    layer: LinearLayer, inner: Float[Tensor, "b p"], outer: Float[Tensor, "b M d"] | None, rows: Float[Tensor, "r n"]
) -> Float[Tensor, "b M r"]:
    own = gathered(layer, rows).to(inner.dtype)
    count, d, p = own.shape
    outputs = (own.reshape(-1, p) @ inner.T).reshape(count, d, len(inner)).permute(2, 1, 0)
    return outputs if outer is None else outer @ outputs
