"""P^g in a graph, from the terms V ⊗ hᵀ of the layers and what a structure holds of P."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from errbar._curvature import banded, packed
from errbar._export.chain import LayerTerm

Pairs = Mapping[tuple[int, int], Float[Tensor, "rows k"]]


@dataclass(frozen=True, eq=False)
class Parts:
    """Which inputs or outputs of a layer have coefficients of P with others, and which with themselves alone.

    A ReLU that no training input has passed has none with others: its parameters are as the prior has them.
    """

    joined: Int[Tensor, "n"]
    alone: Int[Tensor, "m"]

    @staticmethod
    def of(pairs: Bool[Tensor, "k"], others: Bool[Tensor, "size"]) -> Parts:
        """Of the packed pairs that have coefficients, and of those that have some with another layer."""
        a, b = packed.triangle(len(others), pairs.device)
        joined, alone = others.clone(), torch.zeros_like(others)
        distinct = pairs & (a != b)
        joined[a[distinct]] = joined[b[distinct]] = True
        alone[a[pairs & (a == b)]] = True
        return Parts(joined.nonzero()[:, 0], (alone & ~joined).nonzero()[:, 0])

    def packed_pairs(self, size: int) -> tuple[Int[Tensor, "n h"], Float[Tensor, "n h"], Int[Tensor, "m"]]:
        """Where the pairs (i, i + k mod n), k = 0 … n/2, lie among the packed ones; 1 for each pair once, else 0; and
        where the squares of those alone lie."""
        n = len(self.joined)
        start, distance = torch.arange(n)[:, None], torch.arange(n // 2 + 1)
        index = packed.unpack_index(size, self.joined.device)
        # Of an even number those at the distance n/2 come twice.
        once = ((2 * distance < n) | (start < n // 2)).expand(n, n // 2 + 1)
        places = index[self.joined[:, None], self.joined[(start + distance) % max(n, 1)]]
        return places, once.double(), index[self.alone, self.alone]


def _triangle_size(rows: int) -> int:
    """p of p(p+1)/2."""
    return (math.isqrt(8 * rows + 1) - 1) // 2


def _parts(pairs: Pairs, layer: int) -> tuple[Parts, Parts]:
    """Of the inputs and of the outputs of a layer."""
    sizes = {place: [_triangle_size(size) for size in pairs[place, place].shape] for pair in pairs for place in pair}
    inputs, outputs = (torch.zeros(size, dtype=torch.bool) for size in sizes[layer])
    for (x, y), coefficients in pairs.items():
        if x != y and layer in (x, y):
            present, other = coefficients != 0, int(layer == x)
            inputs |= present.any(1).reshape(sizes[x][0], sizes[y][0]).any(other)
            outputs |= present.any(0).reshape(sizes[x][1], sizes[y][1]).any(other)
    own = pairs[layer, layer] != 0
    return Parts.of(own.any(1), inputs), Parts.of(own.any(0), outputs)


class FullCovariance(nn.Module):
    """P^g = Z + Zᵀ, Z = Σ over pairs of layers of V Q V'ᵀ, Q_ij = Σ_ab P[ia, jb] h_a h'_b; within a layer half of it.

    Most of the time of a small batch is that of reading the coefficients of P: rows and columns of zeros are left out.
    Symmetric pairs are arranged by distances, (a, a + k mod n), which makes them without an index for each.
    """

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self.layers = sorted({layer for pair in pairs for layer in pair})
        self.pairs = [pair for pair in pairs if pair[0] != pair[1]]
        self.starts: dict[int, list[int]] = {}
        self.joined: dict[int, tuple[int, int]] = {}
        parts = {layer: _parts(pairs, layer) for layer in self.layers}
        for layer in self.layers:
            self._add_layer(layer, pairs[layer, layer], *parts[layer])
        for x, y in self.pairs:
            p, d = (_triangle_size(size) for size in pairs[y, y].shape)
            (inputs, outputs), (other_inputs, other_outputs) = parts[x], parts[y]
            rows = (inputs.joined[:, None] * p + other_inputs.joined).flatten()
            columns = (outputs.joined[:, None] * d + other_outputs.joined).flatten()
            self.register_buffer(f"coefficients_{x}_{y}", pairs[x, y][rows][:, columns].contiguous())

    def _add_layer(self, layer: int, coefficients: Float[Tensor, "rows k"], inputs: Parts, outputs: Parts) -> None:
        p, d = (_triangle_size(size) for size in coefficients.shape)
        self.joined[layer] = len(inputs.joined), len(outputs.joined)
        if len(inputs.joined) < p:
            self.register_buffer(f"inputs_{layer}", inputs.joined)
        if len(outputs.joined) < d:
            selection = torch.eye(d, dtype=coefficients.dtype)[:, torch.cat([outputs.joined, outputs.alone])]
            self.register_buffer(f"outputs_{layer}", selection)
        places, share, alone = outputs.packed_pairs(d)
        share[:, 0] /= 2
        columns = torch.cat([places.flatten(), alone])
        shares = torch.cat([share.flatten(), torch.full((len(alone),), 0.5)]).to(coefficients.dtype)
        halved = coefficients[:, columns] * shares
        if not banded.suits(p, coefficients.shape[1]):
            if len(inputs.alone):
                self.register_buffer(f"lone_inputs_{layer}", inputs.alone)
            places, share, alone = inputs.packed_pairs(p)
            rows = torch.cat([places.flatten(), alone])
            shares = torch.cat([share.flatten(), torch.ones(len(alone))]).to(coefficients.dtype)
            self.register_buffer(f"coefficients_{layer}_{layer}", halved[rows] * shares[:, None])
            return
        # Many inputs and few outputs: in bands, as for prediction, because the products h_a h_b would be too many.
        self.starts[layer] = list(range(0, p, banded.ROWS))
        for start, band in zip(self.starts[layer], banded.from_packed(halved, p), strict=True):
            self.register_buffer(
                f"coefficients_{layer}_{layer}_{start}",
                band.flatten(0, 1).T.clone(memory_format=torch.contiguous_format),
            )

    def forward(self, terms: Sequence[LayerTerm]) -> Float[Tensor, "B M M"]:
        joined = {layer: self._joined_inputs(layer, terms[layer].inner) for layer in self.layers}
        outer = {layer: self._selected_outer(layer, terms[layer].outer) for layer in self.layers}
        total: Tensor | None = None
        for y in self.layers:
            count, V = self.joined[y][1], outer[y]
            inside = self._own(y, terms[y].inner, joined[y])
            pairs = count * (count // 2 + 1)
            parts = []
            if count:
                half = _from_distances(inside[:, :pairs], count)
                parts.append(half if V is None else V[..., :count] @ half)
            for x, other in self.pairs:
                if other == y and count and self.joined[x][1]:
                    products = (joined[x][:, :, None] * joined[y][:, None, :]).flatten(1)
                    between = products @ self.get_buffer(f"coefficients_{x}_{y}")
                    between = between.reshape(-1, self.joined[x][1], count)
                    first = outer[x]
                    parts[0] = parts[0] + (between if first is None else first[..., : self.joined[x][1]] @ between)
            if V is not None:
                if inside.shape[1] > pairs:
                    parts.append(V[..., count:] * inside[:, None, pairs:])
                parts = [(parts[0] if len(parts) == 1 else torch.cat(parts, 2)) @ V.mT]
            total = parts[0] if total is None else total + parts[0]
        assert total is not None
        return total + total.mT

    def _joined_inputs(self, layer: int, inner: Float[Tensor, "B p"]) -> Float[Tensor, "B n"]:
        index = self.get_buffer(f"inputs_{layer}") if f"inputs_{layer}" in self._buffers else None
        return inner if index is None else inner.index_select(1, index)

    def _selected_outer(self, layer: int, outer: Tensor | None) -> Tensor | None:
        """V of the outputs that have coefficients, those with others first; None for the identity."""
        if f"outputs_{layer}" not in self._buffers:
            return outer
        selection = self.get_buffer(f"outputs_{layer}")
        return selection if outer is None else outer @ selection

    def _own(self, layer: int, inner: Float[Tensor, "B p"], joined: Float[Tensor, "B n"]) -> Float[Tensor, "B k"]:
        """Half of Q of one layer: the pairs of outputs by their distances, and the squares of those that are alone."""
        if layer in self.starts:
            return self._by_bands(layer, inner)
        count = self.joined[layer][0]
        parts = [_by_distances(joined, count)] if count else []
        if f"lone_inputs_{layer}" in self._buffers:
            parts.append(inner.index_select(1, self.get_buffer(f"lone_inputs_{layer}")).square())
        products = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        return products @ self.get_buffer(f"coefficients_{layer}_{layer}")

    def _by_bands(self, layer: int, inner: Float[Tensor, "B p"]) -> Float[Tensor, "B k"]:
        """Q_k = Σ_ab coefficient[k, a, b] h_a h_b, as `banded.contract` has it."""
        total: Tensor | None = None
        for start in self.starts[layer]:
            rows = inner[:, start : start + banded.ROWS]
            product = inner[:, start:] @ self.get_buffer(f"coefficients_{layer}_{layer}_{start}")
            part = (product.reshape(-1, product.shape[1] // rows.shape[1], rows.shape[1]) * rows[:, None, :]).sum(2)
            total = part if total is None else total + part
        assert total is not None
        return total


def _by_distances(inner: Float[Tensor, "B n"], n: int) -> Float[Tensor, "B rows"]:
    """h_i h_(i+k mod n), k = 0 … n/2 from the inside: rows of n + 1 of a repeated h begin one further each.

    In this order partial sums of a quadratic form stay small. With all squares first they would lose a digit.
    """
    shifted = inner.repeat(1, n + 1).reshape(-1, n, n + 1)[:, :, : n // 2 + 1]
    return (shifted * inner[:, :, None]).flatten(1)


def _from_distances(pairs: Float[Tensor, "B rows"], n: int) -> Float[Tensor, "B n n"]:
    """The matrix with entry (i, i + k mod n) = pairs[i, k], k = 0 … n/2, and zeros elsewhere.

    With zeros to a length of n + 1, rows of n hold what is right of the diagonal, and below it what belongs one higher.
    """
    filled = nn.functional.pad(pairs.reshape(-1, n, n // 2 + 1), (0, n - n // 2)).reshape(-1, n + 1, n)
    is_right = torch.ones(n, n, dtype=torch.bool).triu()
    return torch.where(is_right, filled[:, :n], filled[:, 1:])


class IndependentCovariance(nn.Module):
    """P^g = Σ_l Ṽ diag(Σ_a v_ia h̃_a²) Ṽᵀ, for parameters that are independent, as they are or in a basis (kron)."""

    def __init__(self, variances: Sequence[Tensor], bases: Sequence[tuple[Tensor, Tensor]] | None) -> None:
        super().__init__()
        self.rotated = bases is not None
        for index, variance in enumerate(variances):
            self.register_buffer(f"variances_{index}", variance)
        for index, (outer, inner) in enumerate(bases or ()):
            self.register_buffer(f"outer_{index}", outer)
            self.register_buffer(f"inner_{index}", inner)

    def forward(self, terms: Sequence[LayerTerm]) -> Float[Tensor, "B M M"]:
        total: Tensor | None = None
        for index, term in enumerate(terms):
            outer, inner = term.outer, term.inner
            if self.rotated:
                basis = self.get_buffer(f"outer_{index}")
                outer = basis if outer is None else outer @ basis
                inner = inner @ self.get_buffer(f"inner_{index}")
            deviations = (inner.square() @ self.get_buffer(f"variances_{index}").T).sqrt()
            half = torch.diag_embed(deviations) if outer is None else outer * deviations[:, None, :]
            part = half @ half.mT
            total = part if total is None else total + part
        assert total is not None
        return total


class ClassVariance(nn.Module):
    """v_m = hᵀ P_m h of a last layer alone whose classes have nothing in common (`_curvature.per_class`)."""

    def __init__(self, coefficients: Float[Tensor, "rows M"]) -> None:
        super().__init__()
        self.width = _triangle_size(len(coefficients))
        everything = Parts(torch.arange(self.width), torch.arange(0))
        places, once, _ = everything.packed_pairs(self.width)
        by_distances = coefficients[places.flatten()] * once.flatten().to(coefficients.dtype)[:, None]
        self.register_buffer("coefficients", by_distances)

    def forward(self, terms: Sequence[LayerTerm]) -> Float[Tensor, "B M"]:
        (term,) = terms
        return (_by_distances(term.inner, self.width) @ self.get_buffer("coefficients")).clamp_min(0)


class OutputVariance(nn.Module):
    """w_i = Σ_a v_ia h̃_a² of a last layer alone: its logits are independent, as they are or in a basis (kron)."""

    inner: Tensor | None

    def __init__(self, variances: Float[Tensor, "d p"], inner: Float[Tensor, "p p"] | None) -> None:
        super().__init__()
        self.register_buffer("variances", variances)
        self.register_buffer("inner", inner)

    def forward(self, terms: Sequence[LayerTerm]) -> Float[Tensor, "B d"]:
        (term,) = terms
        inner = term.inner if self.inner is None else term.inner @ self.inner
        # Nothing is below zero; it keeps a runtime from making one operation of the product and T_c/T²: `graph._times`.
        return (inner.square() @ self.get_buffer("variances").T).clamp_min(0)
