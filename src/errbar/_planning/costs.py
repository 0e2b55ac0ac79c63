"""What each structure costs in bytes and in multiplications, from sizes alone: nothing is allocated here.

The one source of these numbers: `errbar.plan` shows them, `structure="auto"` chooses by them, and a fit that would not
fit is refused by them before anything large is made. `bench/memory.py` holds them against measured peaks.

Bytes are peaks above what was held before the fit, without the model and the data. Multiplications count passes over
memory too, at about what they cost beside a matrix product.

Symbols: n parameters, M classes, B samples of a batch, d outputs and p inputs of a layer (bias included), T uses of it
for one sample, k the rank of a sketch, K Monte Carlo draws; s and w are the bytes of a number in products and in the
network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from errbar._curvature import banded, dense, lowrank, packed, per_class
from errbar._derivative import layerwise, route, shared
from errbar._planning.workload import (
    Cost,
    Structure,
    Workload,
    backward_bytes,
    by_device,
    by_layer_bytes,
    drawing_bytes,
    drawing_products,
    explicit_bytes,
    explicit_products,
    jacobian_samples,
    kept_bytes,
    row_bytes,
    samples_at_a_time,
)

# eigh takes the matrix, its eigenvectors and 2 n² numbers of workspace; MKL one matrix more. In multiplications,
# measured against a product of the same size.
_EIGEN_MATRICES = 5
_EIGEN_PRODUCTS = 6
# A product is added to a sum in float64: for each number as long as so many multiplications.
_ADDED_PRODUCTS = 200


def cost(structure: Structure, work: Workload) -> Cost:
    """What a fit and predictions with `structure` take."""
    kinds: dict[Structure, Callable[[Workload], Cost]] = {
        "dense": _per_class if work.is_per_class else _dense,
        "block": _block,
        "kron": _kronecker,
        "lowrank": _low_rank,
        "diag": _diagonal,
    }
    return kinds[structure](work)


def _pairs(work: Workload, *, contrasts: bool) -> Iterator[tuple[int, int, int, int]]:
    """Rows, columns, p and multiplications a sample of each packed block, for all pairs of layers."""
    for y, second in enumerate(work.terms):
        for x, first in enumerate(work.terms[: y + 1]):
            d, e = (
                t.outputs - 1 if contrasts and t.returns_logits and work.fisher == "ggn" else t.outputs
                for t in (first, second)
            )
            p, q = first.width, second.width
            if x != y:
                yield p * q, d * e, p, first.uses * second.uses * p * q * d * e
                continue
            k = d * (d + 1) // 2
            rows = p * (p + 1) // 2
            if banded.suits(p, k):
                # Bands hold a little more than the triangle.
                rows = rows + banded.ROWS * p // 2
            yield rows, k, p, first.uses * rows * k
            if first.uses > 1:
                yield p * p, d * d, p, first.uses * (first.uses - 1) // 2 * (p * d) ** 2


def _staged(work: Workload) -> tuple[int, int]:
    """How many samples are gathered before they are multiplied, and the bytes of them and of their products."""
    terms = [term for term in work.terms for _ in range(term.uses)]
    numbers = work.classes**2 + sum(t.width + (0 if t.returns_logits else work.classes * t.outputs) for t in terms)
    outputs = work.classes - 1 if work.fisher == "ggn" else work.classes
    in_bands = len(terms) == 1 and terms[0].returns_logits and banded.suits_outputs(terms[0].width, outputs)
    most = int(by_device(dense.STAGED_SAMPLES_OF_BANDS if in_bands else dense.STAGED_SAMPLES, work.device))
    samples = max(1, min(most, dense.STAGED_BYTES // (numbers * work.itemsize)))
    d = max(term.outputs for term in work.terms)
    tile = by_device(packed.TILE_BYTES, work.device)
    return samples, int(samples * (2 * numbers + work.classes * d + 2 * d * d) * work.itemsize + 2 * tile)


def _dense(work: Workload) -> Cost:
    """n × n matrices of float64: the information and the Cholesky factor after the fit, the covariance to predict."""
    n, s = work.n, work.itemsize
    square = 8 * n * n
    if work.is_factored:
        summed = list(_pairs(work, contrasts=True))
        numbers = sum(rows * k for rows, k, _, _ in summed)
        widest = max(p * n for _, _, p, _ in summed)
        samples, staged = _staged(work)
        unpacking = 8 * max(rows * k for rows, k, _, _ in summed) + 2 * 8 * widest
        collecting = square + 8 * numbers + staged + unpacking
        packed_pairs = list(_pairs(work, contrasts=False))
        coefficients = s * sum(rows * k for rows, k, _, _ in packed_pairs)
        repacking = 4 * 8 * widest + s * max(rows * k for rows, k, _, _ in packed_pairs)
        d = max(term.outputs for term in work.terms)
        contraction = min(work.batch, 1024) * (work.classes * d + 2 * d * d + 2 * work.classes**2) * s
        predicting = 3 * square + coefficients + max(repacking, contraction + drawing_bytes(work, full=True))
        added = _ADDED_PRODUCTS * numbers / samples
        products: tuple[float, float] = (sum(c for *_, c in summed) + added, sum(c for *_, c in packed_pairs))
        once: float = n**3 / 3 + 2 * n**3 / 3 + 20.0 * n * n
        passes = float(work.classes if any(not term.returns_logits for term in work.terms) else 0)
    else:
        jacobian = jacobian_samples(work) * work.classes * n * s
        collecting = square + max(s * n * n + 2 * jacobian, explicit_bytes(work))
        predicting = 2 * square + (s * n * n if s < 8 else 0) + max(explicit_bytes(work), 3 * jacobian)
        predicting += drawing_bytes(work, full=True)
        added = _ADDED_PRODUCTS * n * n / jacobian_samples(work)
        products = (work.classes * n * n + added, work.classes * n * n / 2)
        products = (products[0] + explicit_products(work), products[1] + explicit_products(work))
        once = n**3 / 3 + 10.0 * n * n
        passes = float(work.classes)
    fit = max(collecting, 2 * square)
    inputs = products[1] + drawing_products(work, full=True)
    return Cost(2 * square, fit, predicting, products[0], once, inputs, (passes, passes), exact=True)


def _per_class(work: Workload) -> Cost:
    """A p × p matrix for each class: packed sums and Cholesky factors after the fit, packed coefficients to predict."""
    (term,), classes, s = work.terms, work.classes, work.itemsize
    p = term.width
    rows = p * (p + 1) // 2
    sums, factors = 8 * rows * classes, 8 * classes * p * p
    staged = int(by_device(per_class.STAGED_SAMPLES, work.device)) * (classes + p) * s
    collecting = sums + 2 * staged + 3 * 8 * work.batch * classes
    inverting = 64 * 8 * (2 * p * p + 2 * rows)
    predicting = sums + factors + s * rows * classes + max(inverting, drawing_bytes(work, full=False))
    product = float(rows * classes)
    once = classes * p**3 + 20.0 * rows * classes
    fit, inputs = max(collecting, sums + factors), product + drawing_products(work, full=False)
    return Cost(sums + factors, fit, predicting, product, once, inputs, (0, 0), exact=True)


def _block(work: Workload) -> Cost:
    """What `dense` takes for each module alone; derivatives are made for all of them together."""
    if work.is_factored:
        parts = [_dense(work.of_module(module, size)) for module, size in work.modules]
        posterior = sum(part.posterior_bytes for part in parts)
        transient = max(part.fit_bytes - part.posterior_bytes // 2 for part in parts)
        drawing = (len(parts) - 1) * drawing_bytes(work, full=True)
        repeated = (len(parts) - 1) * drawing_products(work, full=True)
        return Cost(
            posterior,
            max(posterior // 2 + transient, posterior),
            sum(part.predict_bytes for part in parts) - drawing,
            sum(part.sample_products for part in parts),
            sum(part.once_products for part in parts),
            sum(part.input_products for part in parts) - repeated,
            _most(part.seeds for part in parts),
            exact=len(parts) == 1,
        )
    s, sizes = work.itemsize, [size for _, size in work.modules]
    squares = sum(size**2 for size in sizes)
    jacobian = jacobian_samples(work) * work.classes * work.n * s
    fit = max(16 * squares, 8 * squares + max(s * max(sizes) ** 2 + 2 * jacobian, explicit_bytes(work)))
    predict = 16 * squares + (s * squares if s < 8 else 0) + max(explicit_bytes(work), 3 * jacobian)
    products = work.classes * squares + _ADDED_PRODUCTS * squares / jacobian_samples(work) + explicit_products(work)
    return Cost(
        16 * squares,
        fit,
        predict + drawing_bytes(work, full=True),
        products,
        sum(size**3 / 3 for size in sizes) + 10.0 * squares,
        work.classes * squares / 2 + explicit_products(work) + drawing_products(work, full=True),
        (float(work.classes), float(work.classes)),
        exact=len(sizes) == 1,
    )


def _most(seeds: Iterable[tuple[float, float]]) -> tuple[float, float]:
    first, second = (max(values) for values in zip(*seeds, strict=True))
    return first, second


# --------------------------------------------------------------------------------------------------- the inexact ones


def _kronecker(work: Workload) -> Cost:
    """A and G of each layer, their eigenvectors and the precisions; in between the workspace of the largest."""
    s, w, classes = work.itemsize, work.network_itemsize, work.classes
    sums = 8 * sum(t.width**2 + t.outputs**2 for t in work.terms) + 8 * work.rest
    bases = sums + 8 * sum(t.size for t in work.terms)
    inner, outer = work.inner_size, work.outer_size
    limit = layerwise.part_bytes(work.device)
    largest = max([t.width for t in work.terms] + [t.outputs for t in work.terms], default=0)
    uses = max((t.uses * t.width for t in work.terms), default=0)

    collected = samples = samples_at_a_time(work, inner + 2 * outer + classes * work.rest)
    seeds = min(classes, max(1, limit // (8 * max(1, samples * outer))))
    kept = kept_bytes(work, samples) if outer or work.rest else 0
    backward = max(
        2 * seeds * samples * (outer + work.widest) * w if outer else 0,
        backward_bytes(work, samples, classes) if work.alone else 0,
    )
    step = s * largest**2 + 2 * s * samples * uses + 3 * 8 * samples * classes
    collecting = sums + kept + max(backward, step)
    conditioning = sums + bases + (_EIGEN_MATRICES - 1) * 8 * largest**2

    samples = samples_at_a_time(work, inner + classes * (outer + work.rest))
    predicting = sums + bases + (s * bases // 8 + s * sum(t.size for t in work.terms) if s < 8 else 0)
    factored = len(work.terms) == 1 and not work.rest and work.terms[0].returns_logits
    if factored:
        predicting += 2 * 8 * classes**2 + work.draws * classes * w + drawing_bytes(work, full=False)
    else:
        # V of the layer at hand is there three times: as the backward pass leaves it, put together, and rotated.
        predicting += by_layer_bytes(work, samples) + _pieces(work, samples) + drawing_bytes(work, full=True)
    once = _EIGEN_PRODUCTS * sum(t.width**3 + t.outputs**3 for t in work.terms)
    products = sum(t.uses * (t.width**2 + (0 if t.returns_logits else classes * t.outputs**2)) for t in work.terms)
    added = _ADDED_PRODUCTS * (sums // 8) / collected
    inputs: float = sum(t.width**2 + t.size for t in work.terms)
    if not factored:
        repeated = [t for t in work.terms if t.uses > 1]
        inputs = sum(
            t.uses * (t.width**2 + classes * t.outputs**2 + (t.uses > 1) * classes * t.size) for t in work.terms
        )
        inputs += sum(classes**2 * t.size for t in repeated)
    passes = _passes(work)
    fit = max(collecting, conditioning, sums + bases)
    inputs += drawing_products(work, full=True)
    return Cost(sums + bases, fit, predicting, products + added, float(once), inputs, (passes, passes), exact=False)


def _passes(work: Workload) -> float:
    """Backward passes for a sample: of all layers and norms together, and of what goes alone."""
    together = work.outer_size > 0 or work.rest > sum(work.alone)
    return float(work.classes * (together + bool(work.alone)))


def _pieces(work: Workload, samples: int) -> int:
    """Bytes of the Jacobians of one layer that is used several times, of some samples at a time, and of products."""
    widest = max((term.size for term in work.terms if term.uses > 1), default=0)
    most = by_device(shared.JACOBIAN_BYTES, work.device)
    return int(3 * min(most, samples * work.classes * work.itemsize * widest))


def _low_rank(work: Workload) -> Cost:
    """k rows and k directions of n numbers; 2k rows and the rows of some samples while they are made."""
    n, s, w, classes = work.n, work.itemsize, work.network_itemsize, work.classes
    rank = min(work.rank, n)
    columns = classes if work.fisher == "eta" else max(1, classes - 1)
    at_once = int(by_device(lowrank.ROWS, work.device))
    limit = int(by_device(lowrank.ROW_BYTES, work.device))
    rows = min(at_once, max(1, limit // (n * w)))
    samples, seeds = min(work.batch, max(1, rows // columns)), min(rows, columns)

    def pulled(samples: int, seeds: int) -> int:
        return row_bytes(work, samples, seeds) + backward_bytes(work, samples, seeds)

    sketch = rank * n * s
    posterior = 2 * sketch + 3 * 8 * n
    collecting = 2 * sketch + 8 * n + pulled(samples, seeds)
    conditioning = posterior + 3 * 8 * max(2**20, 2048 * rank)
    few = min(work.batch, max(1, min(at_once // classes, limit // (classes * n * w))))
    large = classes * n * w > lowrank.JACOBIAN_BYTES
    inputs = pulled(1, 2) + 6 * n * s if large else pulled(few, classes)
    predicting = posterior + inputs + drawing_bytes(work, full=True)
    once = 2.0 * rank**2 * n + 20.0 * rank**3
    predict_products = classes * n * (2.0 * rank + classes) + drawing_products(work, full=True)
    fit = max(collecting, conditioning)
    return Cost(
        posterior,
        fit,
        predicting,
        5.0 * rank * n * columns,
        once,
        predict_products,
        (float(columns), float(classes)),
        exact=False,
    )


def _diagonal(work: Workload) -> Cost:
    """n numbers of information and n precisions; beside them the derivatives of some samples."""
    n, s, classes = work.n, work.itemsize, work.classes
    posterior = 2 * 8 * n
    if work.is_factored:
        samples = min(work.batch, int(by_device(route.FACTORED_ROWS, work.device)))
        numbers = sum(t.uses * (2 * t.width + (0 if t.returns_logits else 3 * classes * t.outputs)) for t in work.terms)
        repeated = any(term.uses > 1 for term in work.terms)
        pieces = int(2 * by_device(shared.JACOBIAN_BYTES, work.device)) if repeated else 0
        transient = samples * numbers * s + pieces + 2 * s * max(term.size for term in work.terms)
        products = float(sum(t.uses * (t.size + classes * t.outputs) for t in work.terms))
        full = not (len(work.terms) == 1 and work.terms[0].returns_logits)
        seeds = float(classes if full else 0)
        predicted = products + (classes**2 * sum(t.outputs for t in work.terms) if full else 0)
    else:
        samples = samples_at_a_time(work, work.inner_size + classes * (work.outer_size + work.rest))
        transient, full, seeds = by_layer_bytes(work, samples) + _pieces(work, samples), True, _passes(work)
        products = explicit_products(work) + classes * sum(t.uses * t.size for t in work.terms)
        predicted = products + classes**2 * n
    predicting = posterior + transient + drawing_bytes(work, full=full)
    predicted += drawing_products(work, full=full)
    return Cost(
        posterior, posterior + transient, predicting, products, 10.0 * n, predicted, (seeds, seeds), exact=False
    )
