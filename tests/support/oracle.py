"""The paper's formulas, one short function each, in plain float64 NumPy.

Nothing here is fast and nothing here is clever: sums over samples are loops, inverses are inverses, and no
function knows how the package computes the same thing. Equation labels are those of the paper.

Conventions: a Jacobian of one input is (M, n), row m the gradient of logit m with respect to the flat
parameter vector; Jacobians of many inputs are a list of those. `fisher` is "eta" (eq:information_with_M) or
"ggn" (eq:parmaCovariance). The small networks that the tests share are at the end of the file.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

# ------------------------------------------------------------------------------------------- the model


def softmax(logits: np.ndarray) -> np.ndarray:
    """eq:softmax over the last axis; the shift by the maximum only prevents overflow."""
    exponentials = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return exponentials / np.sum(exponentials, axis=-1, keepdims=True)


def tempered_softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """eq:temp scaling: softmax(g / T)."""
    return softmax(logits / temperature)


def parameter_vector(model: nn.Module, names: list[str]) -> np.ndarray:
    """The named parameters in `named_parameters` order, each row-major, end to end."""
    pieces = [p.detach().numpy().ravel() for name, p in model.named_parameters() if name in names]
    return np.concatenate(pieces)


def with_parameters(model: nn.Module, names: list[str], theta: np.ndarray) -> nn.Module:
    """A copy of the model in which the named parameters are read from a flat vector."""
    other = copy.deepcopy(model)
    start = 0
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if name in names:
                stop = start + parameter.numel()
                parameter.copy_(torch.from_numpy(theta[start:stop].reshape(parameter.shape)))
                start = stop
    assert start == len(theta)
    return other


def logits(model: nn.Module, x: torch.Tensor) -> np.ndarray:
    """g(x; theta), (B, M); one logit g is the pair (0, g), whose softmax is the logistic function."""
    with torch.no_grad():
        output = model(x).numpy()
    if output.shape[1] == 1:
        output = np.hstack([np.zeros_like(output), output])
    return output


def jacobians(model: nn.Module, x: torch.Tensor, names: list[str]) -> list[np.ndarray]:
    """dg_m/dtheta by one backward pass for every sample and every class."""
    parameters = [p for name, p in model.named_parameters() if name in names]
    result = []
    for sample in x:
        output = model(sample[None])[0]
        rows = []
        for value in output:
            gradients = torch.autograd.grad(value, parameters, retain_graph=True)
            rows.append(np.concatenate([g.numpy().ravel() for g in gradients]))
        if len(rows) == 1:
            rows.insert(0, np.zeros_like(rows[0]))
        result.append(np.array(rows))
    return result


def jacobians_by_differences(model: nn.Module, x: torch.Tensor, names: list[str], step: float = 1e-5) -> list:
    """dg_m/dtheta by central differences: the error is O(step^2) + O(1e-16 / step), about 1e-10."""
    theta = parameter_vector(model, names)
    columns = []
    for i in range(len(theta)):
        shift = np.zeros_like(theta)
        shift[i] = step
        above = logits(with_parameters(model, names, theta + shift), x)
        below = logits(with_parameters(model, names, theta - shift), x)
        columns.append((above - below) / (2.0 * step))
    return list(np.stack(columns, axis=-1))


# -------------------------------------------------------------------------------- parameter covariance


def eta(f: np.ndarray) -> np.ndarray:
    """eq:eta: f_m (1 - f_m)."""
    return np.array([f_m * (1.0 - f_m) for f_m in f])


def logit_fisher(f: np.ndarray, fisher: str) -> np.ndarray:
    """Fisher information of one label about the logits: diag f - f f^T, or its diagonal."""
    if fisher == "eta":
        return np.diag(eta(f))
    return np.diag(f) - np.outer(f, f)


def logit_fisher_root(f: np.ndarray, fisher: str) -> np.ndarray:
    """A square root of `logit_fisher`: diag sqrt(eta) (eq:u_derivative), or diag sqrt(f) - f sqrt(f)^T."""
    if fisher == "eta":
        return np.diag(np.sqrt(eta(f)))
    return np.diag(np.sqrt(f)) - np.outer(f, np.sqrt(f))


def information(J: list[np.ndarray], g: np.ndarray, fisher: str) -> np.ndarray:
    """eq:information_with_M (eta) or eq:parmaCovariance (ggn): a sum over samples and pairs of classes."""
    total = np.zeros((J[0].shape[1], J[0].shape[1]))
    for J_n, g_n in zip(J, g, strict=True):
        weights = logit_fisher(softmax(g_n), fisher)
        for m, row in enumerate(J_n):
            for k, other_row in enumerate(J_n):
                total += weights[m, k] * np.outer(row, other_row)
    return total


def covariance(total_information: np.ndarray, prior_precision: np.ndarray) -> np.ndarray:
    """eq:PN approx: (I + P_0^{-1})^{-1}."""
    return np.linalg.inv(total_information + np.diag(prior_precision))


def recursive_covariance(J: list[np.ndarray], g: np.ndarray, prior_precision: np.ndarray, fisher: str) -> np.ndarray:
    """eq:recUpdate_all to the letter, started at P_0, one sample after the other."""
    P = np.diag(1.0 / prior_precision)
    for J_n, g_n in zip(J, g, strict=True):
        U = J_n.T @ logit_fisher_root(softmax(g_n), fisher)
        K = P @ U @ np.linalg.inv(np.eye(U.shape[1]) + U.T @ P @ U)
        P = P - K @ U.T @ P
    return P


def log_evidence(log_likelihood: float, theta: np.ndarray, prior_precision: np.ndarray, P: np.ndarray) -> float:
    """eq:laplace approx integrated: L_N(theta) + ln N(theta; 0, P_0) + n/2 ln 2 pi + 1/2 ln det P."""
    log_prior = 0.0
    for value, precision in zip(theta, prior_precision, strict=True):
        log_prior += 0.5 * math.log(precision) - 0.5 * math.log(2.0 * math.pi) - 0.5 * precision * value**2
    sign, log_determinant = np.linalg.slogdet(P)
    assert sign > 0
    return log_likelihood + log_prior + 0.5 * len(theta) * math.log(2.0 * math.pi) + 0.5 * log_determinant


# ------------------------------------------------------------------------------------------ prediction


def logit_covariance(J_n: np.ndarray, P: np.ndarray) -> np.ndarray:
    """eq:linearize: P^g = J P J^T."""
    return J_n @ P @ J_n.T


def joint_logit_covariance(J: list[np.ndarray], P: np.ndarray) -> np.ndarray:
    """The blocks R_ij = J_i P J_j^T of section Fusion, as (C, M, C, M)."""
    C, M = len(J), J[0].shape[0]
    R = np.zeros((C, M, C, M))
    for i in range(C):
        for j in range(C):
            R[i, :, j, :] = J[i] @ P @ J[j].T
    return R


def gaussian_draws(mean: np.ndarray, cov: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Draws of N(mean, cov), (K, M), for any positive semi-definite covariance (symmetric square root)."""
    values, vectors = np.linalg.eigh(cov)
    root = vectors * np.sqrt(np.clip(values, 0.0, None))
    return mean + np.random.default_rng(seed).standard_normal((samples, len(mean))) @ root.T


def marginal_samples(mean: np.ndarray, cov: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """eq:gmarg, first two lines: f^(k) = softmax(g^(k)), g^(k) ~ N(mean, cov); (K, M)."""
    return softmax(gaussian_draws(mean, cov, samples, seed))


def parameter_marginal_samples(
    model: nn.Module,
    x: torch.Tensor,
    names: list[str],
    P: np.ndarray,
    temperature: float,
    samples: int,
    seed: int,
) -> np.ndarray:
    """eq:genMC: theta^(k) ~ N(theta, P), the whole network, softmax(g / T); (B, K, M)."""
    thetas = gaussian_draws(parameter_vector(model, names), P, samples, seed)
    draws = [tempered_softmax(logits(with_parameters(model, names, theta), x), temperature) for theta in thetas]
    return np.stack(draws, axis=1)


def pmf(f: np.ndarray) -> np.ndarray:
    """eq:gmarg, third line: the mean of (K, M) samples."""
    return np.sum(f, axis=0) / len(f)


def pmf_covariance(f: np.ndarray) -> np.ndarray:
    """eq:gmarg, last line: P^f, normalised by K and not by K - 1."""
    deviations = f - pmf(f)
    return deviations.T @ deviations / len(f)


def risk(f: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Section Risk: the share of (K, M) samples with f_m > gamma_m, strictly."""
    return np.mean(f > thresholds, axis=0)


def interval_brackets(f: np.ndarray, level: float) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """The order statistics of (K, M) samples around the two quantiles of an equal-tailed interval.

    Sample quantiles have several definitions; all lie between neighbours of the order statistic K q.
    """
    K = len(f)
    ordered = np.sort(f, axis=0)
    brackets = []
    for probability in ((1.0 - level) / 2.0, (1.0 + level) / 2.0):
        below = max(math.floor(K * probability) - 1, 0)
        above = min(math.ceil(K * probability), K - 1)
        brackets.append((ordered[below], ordered[above]))
    return tuple(brackets)


def entropy(f: np.ndarray) -> float:
    """Shannon entropy of one PMF in nats, 0 ln 0 = 0."""
    return -sum(f_m * math.log(f_m) for f_m in f if f_m > 0.0)


def mutual_information(f: np.ndarray) -> float:
    """Entropy of the mean of (K, M) samples minus the mean of their entropies."""
    return entropy(pmf(f)) - sum(entropy(f_k) for f_k in f) / len(f)


# ---------------------------------------------------------------------------------------------- fusion


def contrast_basis(M: int) -> np.ndarray:
    """An orthonormal basis of the complement of (1, ..., 1), (M, M - 1): Helmert's contrasts."""
    basis = np.zeros((M, M - 1))
    for k in range(1, M):
        basis[:k, k - 1] = 1.0
        basis[k, k - 1] = -k
        basis[:, k - 1] /= math.sqrt(k * (k + 1.0))
    return basis


def center(mean: np.ndarray) -> np.ndarray:
    """Logits minus their average over the classes: the contrasts, written with M numbers."""
    return mean - np.mean(mean, axis=-1, keepdims=True)


def fuse(means: list[np.ndarray], covariances: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Section Fusion, independent classifiers: P = (sum P_c^{-1})^{-1}, g = P sum P_c^{-1} g_c."""
    precision = sum(np.linalg.inv(P_c) for P_c in covariances)
    weighted = sum(np.linalg.inv(P_c) @ g_c for g_c, P_c in zip(means, covariances, strict=True))
    P = np.linalg.inv(precision)
    return P @ weighted, P


def fuse_contrasts(means: list[np.ndarray], covariances: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`fuse` for the contrasts B^T g, mapped back by B: the common shift of the logits says nothing."""
    B = contrast_basis(len(means[0]))
    mean, P = fuse([B.T @ g for g in means], [B.T @ P_c @ B for P_c in covariances])
    return B @ mean, B @ P @ B.T


def inverse_on_range(R: np.ndarray, rcond: float) -> np.ndarray:
    """Pseudo-inverse of a symmetric matrix: eigenvalues above rcond times the largest one."""
    values, vectors = np.linalg.eigh(R)
    result = np.zeros_like(R)
    for value, vector in zip(values, vectors.T, strict=True):
        if value > rcond * values[-1]:
            result += np.outer(vector, vector) / value
    return result


def fuse_frames(z: np.ndarray, R: np.ndarray, rcond: float = 1e-10) -> tuple[np.ndarray, np.ndarray]:
    """Section Fusion, frames of one object: P = (H^T R^{-1} H)^{-1}, g = P H^T R^{-1} z.

    z is (C, M) and R (C, M, C, M); a singular R is inverted on its range.
    """
    C, M = z.shape
    H = np.vstack([np.eye(M) for _ in range(C)])
    R_inverse = inverse_on_range(R.reshape(C * M, C * M), rcond)
    P = np.linalg.inv(H.T @ R_inverse @ H)
    return P @ H.T @ R_inverse @ z.reshape(C * M), P


def fuse_frames_contrasts(z: np.ndarray, R: np.ndarray, rcond: float = 1e-10) -> tuple[np.ndarray, np.ndarray]:
    """`fuse_frames` for the contrasts of every frame, mapped back by the basis."""
    C, M = z.shape
    B = contrast_basis(M)
    R_contrasts = np.zeros((C, M - 1, C, M - 1))
    for i in range(C):
        for j in range(C):
            R_contrasts[i, :, j, :] = B.T @ R[i, :, j, :] @ B
    mean, P = fuse_frames(np.array([B.T @ z_c for z_c in z]), R_contrasts, rcond)
    return B @ mean, B @ P @ B.T


# --------------------------------------------------------------------------------------------- metrics


def accuracy(p: np.ndarray, labels: np.ndarray) -> float:
    """The share of samples whose most probable class is the label."""
    return sum(int(np.argmax(p_n) == y_n) for p_n, y_n in zip(p, labels, strict=True)) / len(p)


def log_likelihood(p: np.ndarray, labels: np.ndarray) -> float:
    """eq:crossentroAll: sum of ln f_{y_n}."""
    return sum(math.log(p_n[y_n]) for p_n, y_n in zip(p, labels, strict=True))


def nll(p: np.ndarray, labels: np.ndarray) -> float:
    """Mean negative log likelihood."""
    return -log_likelihood(p, labels) / len(p)


def brier(p: np.ndarray, labels: np.ndarray) -> float:
    """Section Brier score: mean over samples of the sum over classes of (delta - p)^2."""
    total = 0.0
    for p_n, y_n in zip(p, labels, strict=True):
        for m, p_nm in enumerate(p_n):
            total += (float(m == y_n) - p_nm) ** 2
    return total / len(p)


def confidence_bins(p: np.ndarray, bins: int) -> list[list[int]]:
    """B_j = {n: (j - 1)/J <= max_m p < j/J}, the last bin closed at 1."""
    members = []
    for j in range(1, bins + 1):
        inside = []
        for n, p_n in enumerate(p):
            confidence = max(p_n)
            if (j - 1) / bins <= confidence and (confidence < j / bins or j == bins):
                inside.append(n)
        members.append(inside)
    return members


def calibration_gap(p: np.ndarray, labels: np.ndarray, members: list[int]) -> float:
    """|acc(B_j) - conf(B_j)| of one non-empty bin."""
    hits = sum(int(np.argmax(p[n]) == labels[n]) for n in members) / len(members)
    confidence = sum(max(p[n]) for n in members) / len(members)
    return abs(hits - confidence)


def ece(p: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """The usual expected calibration error: gaps weighted by |B_j| / N."""
    return sum(len(b) / len(p) * calibration_gap(p, labels, b) for b in confidence_bins(p, bins) if b)


def ece_literal(p: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """The formula as printed in section Confidence: gaps weighted by 1 / |B_j|, empty bins skipped."""
    return sum(calibration_gap(p, labels, b) / len(b) for b in confidence_bins(p, bins) if b)


def aurc(p: np.ndarray, labels: np.ndarray) -> float:
    """Area under the risk-coverage curve: the mean over k of the error rate among the k most confident."""
    order = sorted(range(len(p)), key=lambda n: -max(p[n]))
    errors = [int(np.argmax(p[n]) != labels[n]) for n in order]
    return sum(sum(errors[:k]) / k for k in range(1, len(p) + 1)) / len(p)


def auroc(scores: np.ndarray, positive: np.ndarray) -> float:
    """The probability that a positive scores above a negative, ties counted one half."""
    wins, pairs = 0.0, 0
    for score, is_positive in zip(scores, positive, strict=True):
        for other, other_is_positive in zip(scores, positive, strict=True):
            if is_positive and not other_is_positive:
                wins += 1.0 if score > other else 0.5 if score == other else 0.0
                pairs += 1
    return wins / pairs


# --------------------------------------------------------------------------------- logistic regression


def newton_logistic_regression(x: np.ndarray, labels: np.ndarray, M: int, prior_precision: float) -> np.ndarray:
    """eq:map_estimate for g = W (x, 1): Newton's method on M (d + 1) parameters; returns W, (M, d + 1)."""
    phi = np.hstack([x, np.ones((len(x), 1))])
    targets = np.eye(M)[labels]
    W = np.zeros((M, phi.shape[1]))
    for _ in range(50):
        f = softmax(phi @ W.T)
        gradient = (targets - f).T @ phi - prior_precision * W
        curvature = np.einsum("nm,mk->nmk", f, np.eye(M)) - np.einsum("nm,nk->nmk", f, f)
        hessian = np.einsum("nmk,ni,nj->mikj", curvature, phi, phi).reshape(W.size, W.size)
        step = np.linalg.solve(hessian + prior_precision * np.eye(W.size), gradient.ravel())
        W = W + step.reshape(W.shape)
        if np.max(np.abs(step)) < 1e-10:
            return W
    raise AssertionError("Newton's method did not converge: the problem is too close to separable")


# ---------------------------------------------------------------------------------- the small networks


class ResidualNet(nn.Module):
    """LayerNorm, GELU and a residual connection; registered in another order than they run."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.mix = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.embed = nn.Linear(4, 5)
        self.final_norm = nn.LayerNorm(5)
        self.activation = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x + self.mix(self.activation(self.norm(x)))
        return self.head(self.final_norm(x))


class ExtremeLearningMachine(nn.Module):
    """Random fixed features, phi(x) = tanh(A x), then one linear layer: linear in its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("projection", torch.randn(3, 6, generator=torch.Generator().manual_seed(5)))
        self.readout = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(torch.tanh(x @ self.projection))


def tanh_mlp() -> nn.Module:
    """3 -> 5 -> 4 -> 3."""
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def small_cnn() -> nn.Module:
    """One convolution, pooling, two linear layers, on 6 x 6 images."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 5),
        nn.SiLU(),
        nn.Linear(5, 3),
    )


def one_logit_mlp() -> nn.Module:
    """A binary classifier with a single output."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


@dataclass(frozen=True)
class Network:
    """How to build a small network, the shape of its input, and which modules are its last layers."""

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    layers: tuple[str, ...]  # modules with parameters, in the order in which they run
    n_classes: int = 3

    def model(self, seed: int = 0) -> nn.Module:
        """A float64 network with reproducible weights, far enough from zero that nothing is degenerate."""
        model = self.build().double()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        return model

    def inputs(self, count: int, seed: int) -> torch.Tensor:
        """Standard normal inputs, float64."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, *self.input_shape, generator=generator, dtype=torch.float64)

    def labels(self, count: int, seed: int) -> torch.Tensor:
        """Uniform labels: the formulas hold for any."""
        return torch.randint(0, self.n_classes, (count,), generator=torch.Generator().manual_seed(seed))

    def names(self, model: nn.Module, subset: int | str) -> list[str]:
        """The parameter names of the last `subset` layers, or of all, in `named_parameters` order."""
        kept = self.layers if subset == "all" else self.layers[-int(subset) :]
        return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in kept]


NETWORKS = {
    "mlp": Network(tanh_mlp, (3,), ("0", "2", "4")),
    "cnn": Network(small_cnn, (1, 6, 6), ("0", "4", "6")),
    "residual": Network(ResidualNet, (4,), ("embed", "norm", "mix", "final_norm", "head")),
    "logistic": Network(lambda: nn.Sequential(nn.Linear(4, 3)), (4,), ("0",)),
    "elm": Network(ExtremeLearningMachine, (3,), ("readout",)),
    "one_logit": Network(one_logit_mlp, (3,), ("0", "2"), n_classes=2),
}
