"""The sizes on which the cost of a fit depends, and the costs that all structures share.

These are rows of Jacobians, backward passes and Monte Carlo. The cost of a structure itself is `cost` in its own file.

Costs follow from sizes alone: nothing is allocated. `errbar.plan` shows them, `structure="auto"` chooses by them, and a
fit that exceeds the memory is refused before anything large is allocated. `bench/memory.py` compares them with measured
peaks.

Bytes are peaks above what was allocated before the fit, without the model and the data. Large arrays go back to the
system when they are freed; on a CPU, what the network and small products leave behind stays in the heap of the process,
and is counted as measured. Multiplications include passes over memory, converted by their time relative to a product.

Symbols: n parameters, M classes, B samples of a batch, d outputs and p inputs of a layer (bias included), T uses of it
for one sample, k the rank of a sketch, K Monte Carlo draws; s and w are the bytes of a number in products and in the
network.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from errbar._curvature.fisher import Fisher, comes_apart_by_class
from errbar._derivative import layers, layerwise, route
from errbar._distributions.sampling import BLOCK_BYTES
from errbar._model.selection import owner

# Adding a product to a sum in float64 takes, for each number, as long as so many multiplications.
ADDED_PRODUCTS = 200
# A byte that a pass over memory reads or writes takes about as long as so many multiplications.
MOVED_PRODUCTS = 8
# Bytes of a backward pass for each sample and seed, as a share of the bytes of all module outputs on its path: measured
# on ResNet-20, on a CPU with what stays in the heap.
_BACKWARD_SHARE = {"cpu": 0.7, "cuda": 0.35}
# A draw of the parameters that is pushed forward, and a backward pass for one class, in forward passes.
_PUSH_PASSES, BACKWARD_PASSES = 1.0, 2.0
# Draws of the parameters, and what they become inside the network, take so many bytes at a time.
PUSHED_BYTES = {"cpu": 2**27, "cuda": 2**33}
# What a traced pass keeps, as a share of the bytes of all outputs of modules: measured on ResNet-20.
_KEPT_SHARE = {"cpu": 1.3, "cuda": 1.1}
# Freed pieces above this go back to the system (glibc's largest mmap threshold); smaller ones stay in the heap.
_RETURNED_BYTES = 2**25


@dataclass(frozen=True)
class LayerSize:
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
    one sample, `widest` the numbers of the largest of them, and `itemsize` that of products. `alone` are the sizes of
    the tensors in neither a term nor a norm layer, whose Jacobians are computed one sample at a time. `scores` are the
    labels drawn for each sample, 0 where all classes count. `names` are those of all tensors, `alone_names` of those in
    `alone`. `inputs` are the numbers that a sample consists of, `calls` those of modules in a pass.
    """

    modules: tuple[tuple[str, int], ...]
    tensors: tuple[int, ...]
    terms: tuple[LayerSize, ...]
    classes: int
    batch: int
    fisher: Fisher
    itemsize: int
    network_itemsize: int
    tail_bytes: int
    device: str
    rank: int
    draws: int
    alone: tuple[int, ...] = ()
    widest: int = 0
    scores: int = 0
    names: tuple[str, ...] = ()
    alone_names: tuple[str, ...] = ()
    inputs: int = 0
    calls: int = 0

    @property
    def n(self) -> int:
        return sum(self.tensors)

    @property
    def rest(self) -> int:
        """Parameters that no term holds."""
        return self.n - sum(term.size for term in self.terms)

    @property
    def inner_size(self) -> int:
        """Numbers of h_t that one sample has in all layers."""
        return sum(term.uses * term.width for term in self.terms)

    @property
    def outer_size(self) -> int:
        """Numbers of V_t that one sample and logit have in all layers, and of the widest derivative on the way back."""
        own = sum(term.uses * term.outputs for term in self.terms if not term.returns_logits)
        return own + self.widest if own or self.rest > sum(self.alone) else 0

    @property
    def is_factored(self) -> bool:
        """Whether no Jacobian is formed: only plain layers, whose terms are cheaper."""
        if self.rest or not all(term.plain for term in self.terms):
            return False
        return route.terms_are_cheaper(
            [term.size for term in self.terms for _ in range(term.uses)], self.n, self.classes
        )

    @property
    def is_per_class(self) -> bool:
        single = len(self.terms) == 1 and self.is_factored
        return single and comes_apart_by_class(self.fisher, returns_logits=self.terms[0].returns_logits)

    def of_module(self, module: str, size: int) -> Workload:
        """The part of one module alone, as a block of the structure `block`."""
        terms = tuple(term for term in self.terms if term.module == module)
        return replace(self, modules=((module, size),), tensors=(size,), terms=terms)

    def of_names(self, names: Collection[str]) -> Workload:
        """The part of some of the tensors, as one of the parts of a mixed structure."""
        sizes = {name: size for name, size in zip(self.names, self.tensors, strict=True) if name in names}
        modules: dict[str, int] = {}
        for name, size in sizes.items():
            modules[owner(name)] = modules.get(owner(name), 0) + size
        terms = (self._term_of(term, sizes) for term in self.terms)
        alone = {n: size for n, size in zip(self.alone_names, self.alone, strict=True) if n in sizes}
        return replace(
            self,
            modules=tuple(modules.items()),
            tensors=tuple(sizes.values()),
            terms=tuple(term for term in terms if term is not None),
            alone=tuple(alone.values()),
            names=tuple(sizes),
            alone_names=tuple(alone),
        )

    def _term_of(self, term: LayerSize, names: Collection[str]) -> LayerSize | None:
        """A layer with those of its tensors that are among `names`: its weight, its bias, both or neither."""
        prefix = f"{term.module}." if term.module else ""
        weight, bias = f"{prefix}weight", f"{prefix}bias"
        if all(name in names for name in (weight, bias) if name in self.names):
            return term
        if weight in names:
            return replace(term, width=term.width - 1)
        return replace(term, width=1) if bias in names else None


@dataclass(frozen=True)
class Cost:
    """Bytes: held after the fit, peaks of fit and prediction (both with the posterior). Multiplications: of a sample
    in the fit, once, of an input in a prediction. `seeds` are backward passes for a sample, and for an input.

    `first_products` are the part of `once_products` that the first prediction takes, `draw_products` multiplications of
    a draw of all parameters; `by_draws` says that predictions push such draws forward."""

    posterior_bytes: int
    fit_bytes: int
    predict_bytes: int
    sample_products: float
    once_products: float
    input_products: float
    seeds: tuple[float, float]
    exact: bool
    first_products: float = 0.0
    draw_products: float = 0.0
    by_draws: bool = False

    @property
    def peak_bytes(self) -> int:
        return max(self.fit_bytes, self.predict_bytes)


def draws_are_quicker(classes: int, draws: int) -> bool:
    """Whether K draws of the parameters, pushed forward, take less time than a backward pass for each class."""
    return _PUSH_PASSES * draws < BACKWARD_PASSES * classes


def by_device(values: dict[str, int] | dict[str, float], device: str) -> float:
    return values.get(device, values["cpu"])


def pushed(cost: Cost, work: Workload) -> Cost:
    """The cost with predictions by draws of the parameters, pushed forward."""
    samples = 2 * work.batch * work.classes * work.draws * work.network_itemsize
    return replace(
        cost,
        predict_bytes=int(cost.posterior_bytes + 4 * by_device(PUSHED_BYTES, work.device) + samples),
        # The same draws serve all inputs of a batch.
        input_products=work.draws * (work.classes + cost.draw_products / work.batch),
        seeds=(cost.seeds[0], work.draws * _PUSH_PASSES / BACKWARD_PASSES),
        # Draws need no more than the factors.
        once_products=cost.once_products - cost.first_products,
        first_products=0.0,
        by_draws=True,
    )


def drawing_bytes(work: Workload, *, full: bool) -> int:
    """Bytes of Monte Carlo: the draws, a block of samples, and with full covariances B of these in float64."""
    one = work.classes * work.draws * work.network_itemsize
    block = max(one, min(by_device(BLOCK_BYTES, work.device), work.batch * one))
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


def samples_at_a_time(work: Workload, numbers: int, seeds: int) -> int:
    """Samples whose derivatives, of so many numbers each, are made layer by layer for so many seeds at a time."""
    return min(work.batch, layerwise.rows_at_a_time(numbers, work.widest, work.device, seeds))


def jacobian_samples(work: Workload) -> int:
    """Samples whose Jacobians are made at a time."""
    limit = int(by_device(route.JACOBIAN_BYTES, work.device))
    numbers = work.inner_size + work.classes * (work.outer_size + work.rest)
    by_layer = samples_at_a_time(work, numbers, work.classes)
    return min(by_layer, max(1, limit // (8 * work.classes * work.n)))


def kept_bytes(work: Workload, samples: int) -> int:
    """Bytes that a pass with a graph keeps."""
    return int(samples * by_device(_KEPT_SHARE, work.device) * work.tail_bytes)


def by_layer_bytes(work: Workload, samples: int) -> int:
    """Bytes of derivatives layer by layer: the graph, h_t, V_t, the widest once more, and the rest's columns.

    Or, where it is larger, the backward pass of tensors whose Jacobians are computed one sample at a time.
    """
    w, classes = work.network_itemsize, work.classes
    widest_layer = max((t.uses * t.outputs for t in work.terms if not t.returns_logits), default=0)
    outer = classes * (work.outer_size + 2 * max(widest_layer, work.widest) + work.rest)
    layer_bytes = samples * (2 * work.inner_size * work.itemsize + outer * w)
    alone_bytes = (
        row_bytes(work, samples, classes, work.alone) + backward_bytes(work, samples, classes) if work.alone else 0
    )
    return kept_bytes(work, samples) + max(layer_bytes, alone_bytes)


def explicit_bytes(work: Workload) -> int:
    """Bytes of Jacobians while they are computed: of all layers, and twice those of the largest."""
    samples = jacobian_samples(work)
    each = samples * work.classes * work.network_itemsize
    largest = max((term.size for term in work.terms), default=0)
    return each * (work.n + 2 * largest) + by_layer_bytes(work, samples)


def explicit_products(work: Workload) -> float:
    """Multiplications that stand for the passes over memory of M n numbers; a product does ten in that time."""
    return 10.0 * work.classes * work.n


def backward_passes(work: Workload) -> float:
    """Backward passes for a sample: of all layers and norms together, and of what goes alone."""
    together = work.outer_size > 0 or work.rest > sum(work.alone)
    return float(work.classes * (together + bool(work.alone)))


def piece_bytes(work: Workload, samples: int) -> int:
    """Bytes of the Jacobians of one layer that is used several times, of some samples at a time, and of products."""
    widest = max((term.size for term in work.terms if term.uses > 1), default=0)
    most = by_device(layers.JACOBIAN_BYTES, work.device)
    return int(3 * min(most, samples * work.classes * work.itemsize * widest))
