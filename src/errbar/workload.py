"""The sizes that the cost of a fit depends on, and what all structures need beside their own arrays: rows of Jacobians,
backward passes, Monte Carlo.

Bytes are peaks. Arrays that are large go back to the system when they are freed; on a CPU, what the network and small
products leave behind stays in the heap of the process, and is counted as measured.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from errbar import derivative, prediction
from errbar.fisher import Fisher

Structure = Literal["dense", "block", "kron", "lowrank", "diag"]

# Bytes that a backward pass takes for each sample and seed, as a share of the bytes of all outputs of modules on its
# way: measured on ResNet-20, on a CPU with what stays in the heap.
_BACKWARD_SHARE = {"cpu": 0.7, "cuda": 0.35}
# Freed pieces above this go back to the system (glibc's largest mmap threshold); smaller ones stay in the heap.
_RETURNED_BYTES = 2**25


@dataclass(frozen=True)
class Term:
    """One layer whose Jacobian is Σ_t V_t ⊗ h_tᵀ; `plain` where it is a linear layer that was called once."""

    module: str
    outputs: int
    width: int
    uses: int
    plain: bool
    returns_logits: bool

    @property
    def size(self) -> int:
        return self.outputs * self.width


@dataclass(frozen=True)
class Workload:
    """The sizes of a fit: everything that its cost depends on.

    `modules` are the selected parameters of each module, `tensors` the sizes of all selected tensors, `terms` the
    layers that can be taken apart; `tail_bytes` are the outputs of all modules from the first selected one on, for
    one sample, and `itemsize` that of products.
    """

    modules: tuple[tuple[str, int], ...]
    tensors: tuple[int, ...]
    terms: tuple[Term, ...]
    classes: int
    batch: int
    fisher: Fisher
    itemsize: int
    network_itemsize: int
    tail_bytes: int
    device: str
    rank: int
    draws: int

    @property
    def n(self) -> int:
        return sum(self.tensors)

    @property
    def rest(self) -> int:
        """Parameters that no term holds."""
        return self.n - sum(term.size for term in self.terms)

    @property
    def is_factored(self) -> bool:
        """Whether no Jacobian is formed: only plain layers, whose pairs of terms are cheaper than M n²."""
        if self.rest or not all(term.plain for term in self.terms):
            return False
        total = sum(term.uses * term.size for term in self.terms)
        squares = sum(term.uses * term.size**2 for term in self.terms)
        return squares / 4 + (total**2 - squares) / 2 <= self.classes * self.n**2

    @property
    def is_per_class(self) -> bool:
        single = len(self.terms) == 1 and self.terms[0].returns_logits
        return single and self.is_factored and self.fisher == "eta"

    def of_module(self, module: str, size: int) -> Workload:
        """The part of one module alone, as a block of the structure `block`."""
        terms = tuple(term for term in self.terms if term.module == module)
        return replace(self, modules=((module, size),), tensors=(size,), terms=terms)


@dataclass(frozen=True)
class Cost:
    """Bytes: held after the fit, peaks of fit and prediction (both with the posterior). Multiplications: of a sample
    in the fit, once, of an input in a prediction. `seeds` are backward passes for a sample, and for an input."""

    posterior_bytes: int
    fit_bytes: int
    predict_bytes: int
    sample_products: float
    once_products: float
    input_products: float
    seeds: tuple[float, float]
    exact: bool

    @property
    def peak_bytes(self) -> int:
        return max(self.fit_bytes, self.predict_bytes)


def by_device(values: dict[str, int] | dict[str, float], device: str) -> float:
    return values.get(device, values["cpu"])


def drawing_bytes(work: Workload, *, full: bool) -> int:
    """Bytes of Monte Carlo: the draws, a block of samples, and with full covariances B of these in float64."""
    block = max(by_device(prediction.BLOCK_BYTES, work.device), work.classes * work.draws * work.network_itemsize)
    draws = work.draws * work.classes * (8 + work.network_itemsize)
    covariances = 4 * 8 * work.classes**2 if full else 4 * 8 * work.classes
    return int(6 * block + draws + work.batch * covariances)


def drawing_products(work: Workload, *, full: bool) -> float:
    """Multiplications of Monte Carlo: K draws of M logits from M−1 normal numbers each, or from one."""
    return float(work.draws * work.classes * (work.classes if full else 1))


def backward_bytes(work: Workload, samples: int, seeds: int) -> int:
    """Bytes of a backward pass of so many seeds for each of some samples, mapped over both."""
    return int(samples * seeds * by_device(_BACKWARD_SHARE, work.device) * work.tail_bytes)


def row_bytes(work: Workload, samples: int, seeds: int, tensors: tuple[int, ...] | None = None) -> int:
    """Bytes of rows of Jacobians, and of the pieces that they were put together from.

    Large pieces go back to the system one by one while the rows fill; the largest is there twice while it is copied.
    """
    each = samples * seeds * work.network_itemsize
    sizes = work.tensors if tensors is None else tensors
    large = [size for size in sizes if work.device == "cpu" and size * each >= _RETURNED_BYTES]
    pieces = sum(sizes) - sum(large) + max(large, default=0)
    return each * (sum(sizes) + pieces)


def jacobian_samples(work: Workload) -> int:
    """Samples whose Jacobians are made at a time."""
    return min(work.batch, max(1, derivative.JACOBIAN_BYTES // (8 * work.classes * work.n)))


def explicit_bytes(work: Workload) -> int:
    """Bytes of Jacobians in the making: this part's, twice where it is assembled, and the part's before it."""
    samples = jacobian_samples(work)
    own = samples * work.classes * work.n * work.network_itemsize
    linear = any(term.plain for term in work.terms)
    if not linear:
        return own + row_bytes(work, samples, work.classes) + backward_bytes(work, samples, work.classes)
    rest = work.n - sum(term.size for term in work.terms if term.plain)
    if rest == 0:
        return 4 * own
    largest = max(term.size for term in work.terms if term.plain) / work.n
    generic = row_bytes(work, samples, work.classes, _without_plain(work)) + backward_bytes(work, samples, work.classes)
    return int(2 * own + max(2 * largest * own, generic))


def _without_plain(work: Workload) -> tuple[int, ...]:
    """Sizes of the tensors that no plain linear layer holds."""
    left = Counter(work.tensors)
    for term in work.terms:
        if term.plain:
            left.subtract(
                [size for size in (term.outputs * (term.width - 1), term.outputs, term.size) if left[size] > 0]
            )
    return tuple(left.elements())


def explicit_products(work: Workload) -> float:
    """Multiplications that stand for the passes over memory of M n numbers; a product does ten in that time."""
    return 10.0 * work.classes * work.n
