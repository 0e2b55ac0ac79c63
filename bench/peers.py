"""laplace-torch, at its best: each backend that can do the job, each at its best batch size."""

from __future__ import annotations

import copy
import time
import warnings
from typing import Any

import torch
from common import PRIOR, in_batches
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def backends() -> dict[str, Any]:
    from laplace.curvature import BackPackGGN, CurvlinopsGGN

    found: dict[str, Any] = {"curvlinops": CurvlinopsGGN, "backpack": BackPackGGN}
    try:
        from laplace.curvature.asdl import AsdlGGN

        found["asdl"] = AsdlGGN
    except Exception:
        pass
    try:
        from laplace.curvature.asdfghjkl import AsdfghjklGGN

        found["asdfghjkl"] = AsdfghjklGGN
    except Exception:
        pass
    return found


def fitted(model: nn.Module, x: Tensor, y: Tensor, *, subset: str, structure: str, backend: Any, batch: int) -> Any:
    """A fitted Laplace object; the model is copied because some backends leave attributes on it."""
    from laplace import Laplace

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        approximation = Laplace(
            copy.deepcopy(model),
            "classification",
            subset_of_weights=subset,
            hessian_structure=structure,
            prior_precision=PRIOR,
            backend=backend,
        )
        approximation.fit(DataLoader(TensorDataset(x, y), batch_size=batch))
    return approximation


def factorised(approximation: Any) -> Tensor:
    """The factorisation of the posterior precision, which the peer defers until it is needed and then keeps."""
    approximation._posterior_scale = None
    return approximation.posterior_scale


def predict(approximation: Any, x: Tensor, batch: int, samples: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [
            approximation(part, pred_type="glm", link_approx="mc", n_samples=samples).detach()
            for part, _ in in_batches(x, torch.zeros(len(x)), batch)
        ]
    return torch.cat(parts)


def best_fit(model: nn.Module, x: Tensor, y: Tensor, *, subset: str, structure: str) -> list[dict[str, Any]]:
    """Seconds per sample for each backend and batch size on a few hundred samples, fastest first, failures last."""
    found = []
    for name, backend in backends().items():
        for batch in (32, 128, 512):
            count = min(len(x), 512)
            try:
                start = time.perf_counter()
                fitted(model, x[:count], y[:count], subset=subset, structure=structure, backend=backend, batch=batch)
                seconds = (time.perf_counter() - start) / count
                found.append({"backend": name, "batch": batch, "microseconds": seconds * 1e6})
            except Exception as error:
                found.append({"backend": name, "batch": batch, "failed": f"{type(error).__name__}: {error}"[:120]})
                break
    return sorted(found, key=lambda row: row.get("microseconds", float("inf")))


def best_predict_batch(approximation: Any, x: Tensor, samples: int) -> int:
    """The batch size with the least time per input; its Jacobians take time quadratic in the batch."""
    taken = {}
    for batch in (1, 8, 32, 128):
        count = min(len(x), max(batch, 8))
        start = time.perf_counter()
        predict(approximation, x[:count], batch, samples)
        taken[batch] = (time.perf_counter() - start) / count
    return min(taken, key=taken.__getitem__)
