"""Factors of a posterior as named arrays, and back, so that loading takes no factorisation.

Arrays come back in the memory layout that they had: products of a matrix and of its transposed copy may round
differently, and a loaded posterior shall predict what the saved one did to the last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from errbar._base.container import Contents
from errbar._base.json_fields import Fields
from errbar._curvature.block import BlockFactor, BlockSum
from errbar._curvature.dense import DenseFactor, DenseSum
from errbar._curvature.diagonal import DiagonalFactor
from errbar._curvature.eigenbasis import KroneckerBasis, KroneckerFactor
from errbar._curvature.kronecker import KroneckerSum
from errbar._curvature.lowrank import LowRankFactor, LowRankSum
from errbar._curvature.per_class import PerClassFactor, PerClassSum
from errbar._files.sums import (
    Description,
    Tensors,
    by_columns,
    from_triangle,
    laid_out,
    read_symmetric,
    symmetric_array,
    triangle_array,
)
from errbar._posterior.differentiate import Factor, Sum
from errbar.errors import DamagedFileError


def take_factor_apart(factor: Factor) -> tuple[Description, Tensors]:
    """What is small, and arrays. Of a dense factor P is computed if it was not, as predictions need it."""
    if isinstance(factor, DenseFactor):
        return _dense_apart(factor, "factor")
    if isinstance(factor, BlockFactor):
        pairs = [_dense_apart(part, f"factor.{index}") for index, part in enumerate(factor.factors)]
        return {"blocks": [small for small, _ in pairs]}, {k: v for _, arrays in pairs for k, v in arrays.items()}
    if isinstance(factor, PerClassFactor):
        small = {"jitter": factor.factorisation[1], "lower_columns": by_columns(factor.lower)}
        return small, {"factor.lower": triangle_array(factor.lower, by_columns=by_columns(factor.lower))}
    if isinstance(factor, DiagonalFactor):
        return {"jitter": factor.factorisation[1]}, {"factor.precision": factor.precision}
    if isinstance(factor, LowRankFactor):
        return {"directions": len(factor.directions), "directions_columns": by_columns(factor.directions)}, {
            "factor.precision": factor.precision,
            "factor.directions": factor.directions,
            "factor.strengths": factor.strengths,
        }
    arrays: Tensors = {"factor.rest": factor.rest}
    columns = []
    for index, basis in enumerate(factor.bases):
        parts = {"outer": basis.outer, "inner": basis.inner, "precision": basis.precision}
        arrays |= {f"factor.{index}.{name}": part for name, part in parts.items()}
        columns.append({f"{name}_columns": by_columns(part) for name, part in parts.items()})
    return {"jitter": factor.jitter, "bases": columns}, arrays


def put_factor_together(contents: Contents, total: Sum, prior: Float[Tensor, "n"], limit: float) -> Factor:
    """The factor in a file, on the CPU, of a sum and a prior precision that were read from it."""
    fields = contents.description.part("factor")
    if isinstance(total, DenseSum):
        return _dense_together(contents, fields, "factor", total, prior, limit)
    if isinstance(total, BlockSum):
        parts = fields.parts("blocks")
        if len(parts) != len(total.blocks):
            raise DamagedFileError(f"{contents.path} has {len(parts)} factors for {len(total.blocks)} blocks.")
        made = [
            _dense_together(contents, part, f"factor.{index}", own, block.part.take(prior), limit)
            for index, (part, block, own) in enumerate(zip(parts, total.blocks, total.totals, strict=True))
        ]
        return BlockFactor(total.blocks, tuple(made))
    if isinstance(total, PerClassSum):
        width, classes = total.layer.width, total.totals.shape[1]
        flat = contents.tensor("factor.lower", classes, width * (width + 1) // 2)
        lower = from_triangle(flat, width, by_columns=fields.flag("lower_columns"))
        return PerClassFactor(total.layer, _positive_diagonal(lower, contents), _jitter(fields))
    n = len(prior)
    if isinstance(total, LowRankSum):
        count, dtype = fields.whole("directions"), total.rows.dtype
        precision = _positive(contents, "factor.precision", n)
        directions = contents.tensor("factor.directions", count, n, dtype=dtype)
        directions = laid_out(directions, fields.flag("directions_columns"))
        strengths = contents.tensor("factor.strengths", count)
        if not bool((strengths >= 0).all()):
            raise DamagedFileError(f"{contents.path} has negative strengths of directions.")
        return LowRankFactor(precision, directions, strengths)
    if isinstance(total, KroneckerSum):
        return _kronecker_together(contents, fields, total)
    return DiagonalFactor(_positive(contents, "factor.precision", n), _jitter(fields))


def _dense_apart(factor: DenseFactor, name: str) -> tuple[Description, Tensors]:
    covariance = factor.covariance
    small: dict[str, Any] = {"recursed": factor.recursed, "covariance_columns": by_columns(covariance)}
    arrays = {f"{name}.covariance": symmetric_array(covariance)}
    if "factorisation" in factor.__dict__:
        lower, jitter = factor.factorisation
        arrays[f"{name}.lower"] = triangle_array(lower, by_columns=by_columns(lower))
        small |= {"jitter": jitter, "lower_columns": by_columns(lower)}
    return small, arrays


def _dense_together(
    contents: Contents, fields: Fields, name: str, total: DenseSum, prior: Float[Tensor, "n"], limit: float
) -> DenseFactor:
    n = len(prior)
    covariance = read_symmetric(contents, f"{name}.covariance", n, by_columns=fields.flag("covariance_columns"))
    if not bool((covariance.diagonal() > 0).all()):
        raise DamagedFileError(f"{contents.path} has a covariance with variances that are not positive.")
    made = DenseFactor(total, prior, limit, covariance=covariance, recursed=fields.whole("recursed"))
    if "jitter" in fields:
        flat = contents.tensor(f"{name}.lower", n * (n + 1) // 2)
        lower = from_triangle(flat, n, by_columns=fields.flag("lower_columns"))
        made.__dict__["factorisation"] = (_positive_diagonal(lower, contents), _jitter(fields))
    return made


def _kronecker_together(contents: Contents, fields: Fields, total: KroneckerSum) -> KroneckerFactor:
    parts = fields.parts("bases")
    if len(parts) != len(total.blocks):
        raise DamagedFileError(f"{contents.path} has {len(parts)} bases for {len(total.blocks)} layers.")
    bases = []
    for index, (part, block) in enumerate(zip(parts, total.blocks, strict=True)):
        d, p = block.layer.outputs, block.layer.width
        outer = laid_out(contents.tensor(f"factor.{index}.outer", d, d), part.flag("outer_columns"))
        inner = laid_out(contents.tensor(f"factor.{index}.inner", p, p), part.flag("inner_columns"))
        precision = laid_out(_positive(contents, f"factor.{index}.precision", d, p), part.flag("precision_columns"))
        bases.append(KroneckerBasis(block.layer, outer, inner, precision))
    rest = _positive(contents, "factor.rest", len(total.rest_spans))
    return KroneckerFactor(total.n_parameters, tuple(bases), total.rest_spans, rest, _jitter(fields))


def _jitter(fields: Fields) -> float:
    return float(fields.number("jitter", least=0))


def _positive(contents: Contents, name: str, *shape: int) -> Tensor:
    values = contents.tensor(name, *shape)
    if not bool((values > 0).all()):
        raise DamagedFileError(f"{contents.path} has precisions in '{name}' that are not positive.")
    return values


def _positive_diagonal(lower: Float[Tensor, "*B n n"], contents: Contents) -> Float[Tensor, "*B n n"]:
    if not bool((torch.diagonal(lower, dim1=-2, dim2=-1) > 0).all()):
        raise DamagedFileError(f"{contents.path} has a Cholesky factor whose diagonal is not positive.")
    return lower
