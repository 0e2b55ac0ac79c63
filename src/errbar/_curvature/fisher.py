"""The Fisher information of one categorical observation in its logits, and its square root.

With f = softmax(g):

- `ggn`: Λ = diag f − f fᵀ = R Rᵀ with R = diag √f − f √fᵀ, the Fisher information as eq:parmaCovariance defines it;
- `eta`: the diagonal of Λ alone, η_m = f_m (1 − f_m), as eq:information_with_M writes it out;
- `sampled`: s sᵀ averaged over scores s = e_y − f of labels y drawn from f, an unbiased estimate of `ggn`
  (`_curvature.scores`). What is differentiated are the drawn scores, and in them the information is the identity.

Of several labels, f = σ(g_l) each (`_model.outputs`), Λ = diag f (1 − f) is exact, and `ggn` and `eta` are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from errbar._model.outputs import OutputKind
from errbar.errors import ArgumentError

Fisher = Literal["ggn", "eta", "sampled"]


def require_fisher(fisher: str) -> Fisher:
    if fisher not in get_args(Fisher):
        raise ArgumentError(
            f"fisher is {fisher!r}; expected 'ggn' (the Fisher information of the categorical likelihood), 'eta' "
            "(its diagonal, as the paper writes it out) or 'sampled' ('ggn' by labels drawn from the network)."
        )
    return fisher  # type: ignore[return-value]


def fisher_form(kind: OutputKind, fisher: Fisher) -> Fisher:
    """The form of Λ: "eta" also stands for every Λ that is diagonal anyway."""
    return "eta" if kind.is_diagonal and fisher == "ggn" else fisher


def comes_apart_by_class(fisher: Fisher, *, returns_logits: bool) -> bool:
    """Whether the information of one layer alone is one matrix for each class: Λ is diagonal, and so is ∂g/∂a."""
    return returns_logits and fisher == "eta"


def fisher_diagonal(logits: Float[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    """η, the diagonal of Λ, in float64 because 1 − f has no digits left in float32 where the network is certain."""
    probability = torch.softmax(logits.double(), 1)
    return probability * (1 - probability)


def fisher_matrix(logits: Float[Tensor, "B M"], fisher: Fisher) -> Float[Tensor, "B M M"]:
    """Λ, or its diagonal, in float64."""
    if fisher == "eta":
        return torch.diag_embed(fisher_diagonal(logits))
    probability = torch.softmax(logits.double(), 1)
    return torch.diag_embed(probability) - probability[:, :, None] * probability[:, None, :]


def fisher_root(logits: Float[Tensor, "B M"], fisher: Fisher) -> Float[Tensor, "B M M"]:
    """R with R Rᵀ = Λ, in float64."""
    if fisher == "eta":
        return torch.diag_embed(fisher_diagonal(logits).sqrt())
    probability = torch.softmax(logits.double(), 1)
    root = probability.sqrt()
    return torch.diag_embed(root) - probability[:, :, None] * root[:, None, :]


def fisher_product(
    logits: Float[Tensor, "B M"], values: Float[Tensor, "B M k"], fisher: Fisher
) -> Float[Tensor, "B M k"]:
    """Λ values, without making Λ; f ∘ (v − fᵀv), in which nothing cancels that all classes have in common."""
    if fisher == "eta":
        return fisher_diagonal(logits)[:, :, None] * values
    probability = torch.softmax(logits.double(), 1)
    return probability[:, :, None] * (values - probability[:, None] @ values)


class Weights(Protocol):
    """Λ of B samples, in the c quantities whose derivative is J: the logits, or scores that were drawn."""

    def matrix(self) -> Float[Tensor, "B c c"]:
        """Λ in float64."""
        ...

    def rooted(self, values: Float[Tensor, "B c *k"]) -> Float[Tensor, "B c *k"]:
        """Rᵀ values, R Rᵀ = Λ, in the dtype of the values."""
        ...

    def squares(self, jacobian: Float[Tensor, "B c k"]) -> Float[Tensor, "B k"]:
        """The diagonal of JᵀΛJ of each sample."""
        ...

    def diagonal(self) -> Float[Tensor, "B c"]:
        """The diagonal of Λ, in float64."""
        ...


class RootedWeights(Weights, Protocol):
    """Λ in the logits themselves, with a root R that is made a few columns at a time."""

    def columns(self, first: int, last: int) -> Float[Tensor, "k B c"]:
        """Columns first … last−1 of R, in float64."""
        ...

    def thin_root(self) -> Float[Tensor, "B c k"]:
        """A root in as few columns as there can be, in float64."""
        ...

    def summed(self, dtype: torch.dtype, factors: Float[Tensor, "B"] | None = None) -> Float[Tensor, "c c"]:
        """Σ_n Λ_n, or Σ_n w_n Λ_n, in float64, by products in `dtype`, without making one Λ_n."""
        ...


@dataclass(frozen=True, eq=False)
class LogitWeights:
    """Λ in the logits, by `ggn` or `eta`."""

    logits: Float[Tensor, "B M"]
    fisher: Fisher

    def matrix(self) -> Float[Tensor, "B M M"]:
        return fisher_matrix(self.logits, self.fisher)

    def diagonal(self) -> Float[Tensor, "B M"]:
        return fisher_diagonal(self.logits)

    def rooted(self, values: Float[Tensor, "B M *k"]) -> Float[Tensor, "B M *k"]:
        root = fisher_root(self.logits, self.fisher).to(values.dtype)
        return (root.mT @ values.flatten(2)).reshape(values.shape)

    def squares(self, jacobian: Float[Tensor, "B M k"]) -> Float[Tensor, "B k"]:
        """Σ_m f_m (J_m − J̄)², J̄ = Σ_m f_m J_m; with `eta`, Σ_m η_m J_m². Not Σ f J² − J̄², which cancels where the
        network is sure."""
        if self.fisher == "eta":
            weights = self.diagonal().to(jacobian.dtype)
            return (weights[:, None] @ jacobian.square())[:, 0]
        probability = torch.softmax(self.logits.double(), 1).to(jacobian.dtype)[:, None]
        return (probability @ (jacobian - probability @ jacobian).square_())[:, 0]

    def columns(self, first: int, last: int) -> Float[Tensor, "k B M"]:
        """√f_c (e_c − f), or √η_c e_c."""
        classes = self.logits.shape[1]
        units = torch.eye(classes, dtype=torch.float64, device=self.logits.device)[first:last, None]
        if self.fisher == "eta":
            return self.diagonal()[:, first:last].sqrt().T[:, :, None] * units
        probability = torch.softmax(self.logits.double(), 1)
        return probability[:, first:last].sqrt().T[:, :, None] * (units - probability)

    def thin_root(self) -> Float[Tensor, "B M c"]:
        """M−1 columns for `ggn`.

        Λ = diag √f (I − √f √fᵀ) diag √f, and the middle is the projection on √f⊥, for which the Householder reflection
        that takes e₁ to −√f has an orthonormal basis: all its columns but the first, I − v vᵀ/(1 + √f₁), v = √f + e₁.
        """
        if self.fisher == "eta":
            return fisher_root(self.logits, self.fisher)
        root = torch.softmax(self.logits.double(), 1).sqrt()
        normal = root.clone()
        normal[:, 0] += 1
        reflection = -normal[:, :, None] * (normal / normal[:, :1])[:, None, :]
        reflection.diagonal(dim1=1, dim2=2).add_(1)
        return root[:, :, None] * reflection[:, :, 1:]

    def summed(self, dtype: torch.dtype, factors: Float[Tensor, "B"] | None = None) -> Float[Tensor, "M M"]:
        """−Σ w f fᵀ beside the diagonal and Σ w η, in which nothing cancels, on it."""
        diagonal = _sum_over_samples(self.diagonal(), factors)
        if self.fisher == "eta":
            return torch.diag(diagonal)
        probability = torch.softmax(self.logits.double(), 1)
        probability = (probability if factors is None else probability * factors.sqrt()[:, None]).to(dtype)
        total = -(probability.T @ probability).double()
        total.diagonal().copy_(diagonal)
        return total


@dataclass(frozen=True, eq=False)
class LabelWeights:
    """Λ = diag f (1 − f), f = σ(g), of labels that are true or false by themselves; zero for those in `counted` that
    do not count."""

    logits: Float[Tensor, "B L"]
    counted: Bool[Tensor, "B L"] | None = None

    def matrix(self) -> Float[Tensor, "B L L"]:
        return torch.diag_embed(self.diagonal())

    def diagonal(self) -> Float[Tensor, "B L"]:
        """σ(g) σ(−g): 1 − σ(g) has no digits left where the network is certain."""
        logits = self.logits.double()
        variance = torch.sigmoid(logits) * torch.sigmoid(-logits)
        return variance if self.counted is None else variance * self.counted

    def rooted(self, values: Float[Tensor, "B L *k"]) -> Float[Tensor, "B L *k"]:
        root = self.diagonal().sqrt().to(values.dtype)
        return root.reshape(*root.shape, *[1] * (values.ndim - 2)) * values

    def squares(self, jacobian: Float[Tensor, "B L k"]) -> Float[Tensor, "B k"]:
        weights = self.diagonal().to(jacobian.dtype)
        return (weights[:, None] @ jacobian.square())[:, 0]

    def columns(self, first: int, last: int) -> Float[Tensor, "k B L"]:
        """√Λ_ll e_l."""
        units = torch.eye(self.logits.shape[1], dtype=torch.float64, device=self.logits.device)[first:last, None]
        return self.diagonal()[:, first:last].sqrt().T[:, :, None] * units

    def thin_root(self) -> Float[Tensor, "B L L"]:
        return torch.diag_embed(self.diagonal().sqrt())

    def summed(self, dtype: torch.dtype, factors: Float[Tensor, "B"] | None = None) -> Float[Tensor, "L L"]:
        return torch.diag(_sum_over_samples(self.diagonal(), factors))


def _sum_over_samples(values: Float[Tensor, "B c"], factors: Float[Tensor, "B"] | None) -> Float[Tensor, "c"]:
    return values.sum(0) if factors is None else (values * factors[:, None]).sum(0)


def logit_weights(
    kind: OutputKind, fisher: Fisher, logits: Float[Tensor, "B M"], labels: Int[Tensor, "B *L"] | None
) -> RootedWeights:
    """Λ in the logits themselves, of outputs of some kind with these labels, as the kind has read them."""
    return LabelWeights(logits, kind.counted(labels)) if kind.is_diagonal else LogitWeights(logits, fisher)


@dataclass(frozen=True, eq=False)
class WeightedSamples:
    """w_n Λ_n: what samples tell that count for w_n of one."""

    plain: Weights
    factors: Float[Tensor, "B"]

    def matrix(self) -> Float[Tensor, "B c c"]:
        return self.plain.matrix() * self.factors[:, None, None]

    def diagonal(self) -> Float[Tensor, "B c"]:
        return self.plain.diagonal() * self.factors[:, None]

    def rooted(self, values: Float[Tensor, "B c *k"]) -> Float[Tensor, "B c *k"]:
        rooted = self.plain.rooted(values)
        return rooted * self.factors.sqrt().to(rooted.dtype).reshape(-1, *[1] * (rooted.ndim - 1))

    def squares(self, jacobian: Float[Tensor, "B c k"]) -> Float[Tensor, "B k"]:
        squares = self.plain.squares(jacobian)
        return squares * self.factors[:, None].to(squares.dtype)


@dataclass(frozen=True, eq=False)
class WeightedRoots(WeightedSamples):
    """The same of Λ in the logits themselves."""

    plain: RootedWeights

    def columns(self, first: int, last: int) -> Float[Tensor, "k B c"]:
        return self.plain.columns(first, last) * self.factors.sqrt()[:, None]

    def thin_root(self) -> Float[Tensor, "B c k"]:
        return self.plain.thin_root() * self.factors.sqrt()[:, None, None]

    def summed(self, dtype: torch.dtype, factors: Float[Tensor, "B"] | None = None) -> Float[Tensor, "c c"]:
        return self.plain.summed(dtype, self.factors if factors is None else self.factors * factors)


def weighted(weights: Weights, factors: Float[Tensor, "B"] | None) -> Weights:
    """Λ_n, times w_n where samples have weights."""
    return weights if factors is None else WeightedSamples(weights, factors)


def weighted_root(weights: RootedWeights, factors: Float[Tensor, "B"] | None) -> RootedWeights:
    """The same of Λ in the logits themselves."""
    return weights if factors is None else WeightedRoots(weights, factors)


@dataclass(frozen=True, eq=False)
class ScoreWeights:
    """The identity: the quantities are k drawn scores of each sample, divided by √k."""

    size: int
    draws: int
    device: torch.device

    def matrix(self) -> Float[Tensor, "B k k"]:
        return torch.eye(self.draws, dtype=torch.float64, device=self.device).expand(self.size, -1, -1)

    def diagonal(self) -> Float[Tensor, "B k"]:
        return torch.ones(self.size, self.draws, dtype=torch.float64, device=self.device)

    def rooted(self, values: Float[Tensor, "B k *n"]) -> Float[Tensor, "B k *n"]:
        return values

    def squares(self, jacobian: Float[Tensor, "B k n"]) -> Float[Tensor, "B n"]:
        return jacobian.square().sum(1)
