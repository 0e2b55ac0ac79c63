"""Networks that classify positions: tokens of a sequence, pixels of a picture.

Logits are (B, T, M), or (B, M, H, W) as convolutions return them; what comes back has the classes last, (B, *S, M).
Two views of such a network are differentiated, and nothing else has to know of positions:

- `PositionsNetwork`: every input has S·M logits, flat, position after position. Of these only few combinations are ever
  differentiated: drawn scores, and directions of the parameters.
- `HeadNetwork`: where all that is selected is the layer that returns the logits (linear, or a convolution of one by
  one), the rest of the network only makes its inputs. Each position is then an input of its own to a linear classifier,
  exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from errbar._base.checks import Checks
from errbar._model.batch import Batch
from errbar._model.network import Network, Output, picked, run
from errbar._model.selection import owner
from errbar.errors import LabelError, ModelError

# What torch's losses ignore unless told otherwise.
IGNORE_INDEX = -100


def as_positions(result: Any, size: int, output: Output = None) -> Float[Tensor, "B *S M"]:
    """The logits in a model's result, classes last; one logit g for each position is read as the pair (0, g)."""
    value = picked(result, output)
    logits = getattr(value, "logits", value)
    if (
        not isinstance(logits, Tensor)
        or logits.ndim not in (3, 4)
        or len(logits) != size
        or not logits.is_floating_point()
        or 0 in logits.shape
    ):
        kind = type(value).__name__
        actual = f"a {logits.dtype} tensor of shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else kind
        raise ModelError(
            f"The model returned {actual} for a batch of {size}; with outputs='positions' expected floating-point "
            f"logits of shape ({size}, positions, classes) or ({size}, classes, height, width)."
        )
    if logits.ndim == 4:
        logits = logits.movedim(1, -1)
    return torch.cat([torch.zeros_like(logits), logits], -1) if logits.shape[-1] == 1 else logits


class PositionsNetwork(Network):
    """A model whose logits of one input are those of all its positions, one after the other: (B, S·M)."""

    def as_logits(self, result: Any, size: int) -> Float[Tensor, "B SM"]:
        logits = as_positions(result, size, self.output)
        self._local.spatial = tuple(logits.shape[1:-1])
        return logits.flatten(1)

    @property
    def spatial(self) -> tuple[int, ...]:
        """*S of the last batch that this thread has run."""
        return getattr(self._local, "spatial", ())

    def shaped(self, batch: Batch) -> Float[Tensor, "B *S M"]:
        """The logits of a prepared batch."""
        with torch.set_grad_enabled(self.keeps_graph):
            return as_positions(run(self.replica(), batch), len(batch), self.output)

    def head(self, batch: Batch, names: tuple[str, ...]) -> str | None:
        """The layer that holds all the parameters `names` and returns the logits of a prepared batch; None if none
        does: a linear layer, or a convolution of one by one, that runs once."""
        owners = {owner(name) for name in names}
        if len(owners) != 1:
            return None
        (name,) = owners
        part = dict(self.module.named_modules()).get(name)
        if part is None or not _is_linear(part) or not set(names) <= _own(name, part):
            return None
        seen: list[tuple[Tensor, Tensor]] = []
        result = self._watched(name, batch, seen)
        value = picked(result, self.output)
        logits = getattr(value, "logits", value)
        if len(seen) != 1 or seen[0][1] is not logits or seen[0][0].ndim != logits.ndim:
            return None
        return name

    def inputs_of(self, name: str, batch: Batch) -> Float[Tensor, "B *S q"]:
        """What goes into a layer of `head`, features last."""
        seen: list[tuple[Tensor, Tensor]] = []
        self._watched(name, batch, seen)
        if len(seen) != 1 or len(seen[0][0]) != len(batch):
            raise ModelError(
                f"Layer '{name}' returned the logits of each position in the first batch and does something else now; "
                "expected a model that computes the same function for every batch."
            )
        inputs = seen[0][0] if self.keeps_graph else seen[0][0].detach()
        return inputs.movedim(1, -1) if inputs.ndim == 4 else inputs

    def _watched(self, name: str, batch: Batch, seen: list[tuple[Tensor, Tensor]]) -> Any:
        """The model's result; what goes into a layer and comes out of it is appended to `seen`."""
        replica = self.replica()

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            seen.append((args[0] if args else next(iter(kwargs.values())), output))

        handle = dict(replica.named_modules())[name].register_forward_hook(note, with_kwargs=True)
        try:
            with torch.set_grad_enabled(self.keeps_graph):
                return run(replica, batch)
        finally:
            handle.remove()


class HeadNetwork(Network):
    """The layer that returns the logits, as a classifier of its own: its inputs are those of each position.

    `whole` makes these inputs. Fingerprint, versions and model are those of the whole network; the parameters have the
    names that they have there, and share memory with it. The weight of a convolution is a matrix here.
    """

    def __init__(self, whole: PositionsNetwork, head: str) -> None:
        part = dict(whole.module.named_modules())[head]
        super().__init__(_alone(part, head), marked=False)
        self.whole, self.head = whole, head
        self.model, self.output, self.fingerprint = whole.model, whole.output, whole.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        return {"whole": self.whole, "head": self.head}

    def require_unchanged(self) -> None:
        self.whole.require_unchanged()

    def as_logits(self, result: Any, size: int) -> Float[Tensor, "R M"]:
        logits: Tensor = result
        return torch.cat([torch.zeros_like(logits), logits], 1) if logits.shape[1] == 1 else logits

    def prepare(self, batch: Batch, checks: Checks) -> Batch:
        """Every position as an input of its own."""
        return self.rows(self.prepare_whole(batch, checks))[0]

    def prepare_whole(self, batch: Batch, checks: Checks) -> Batch:
        return self.whole.prepare(batch, checks)

    def rows(self, batch: Batch) -> tuple[Batch, tuple[int, ...]]:
        """The positions of a prepared batch of the whole network, and their leading shape (B, *S)."""
        inputs = self.whole.inputs_of(self.head, batch)
        leading = tuple(inputs.shape[:-1])
        return Batch((inputs.reshape(-1, inputs.shape[-1]),)), leading

    def on_other(self, model: nn.Module) -> HeadNetwork:
        return HeadNetwork(PositionsNetwork(model, self.output), self.head)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter in the user's model."""
        return tuple(dict(self.whole.module.named_parameters())[name].shape)


def _is_linear(part: nn.Module) -> bool:
    """Whether a module is a linear layer, or a convolution that is one at each position."""
    if isinstance(part, nn.Conv2d):
        is_plain = type(part).forward is nn.Conv2d.forward and part.groups == 1 and part.padding_mode == "zeros"
        return is_plain and part.kernel_size == part.stride == (1, 1) and part.padding in ((0, 0), "valid", "same")
    return isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward


def _own(name: str, part: nn.Module) -> set[str]:
    return {f"{name}.{kind}" if name else kind for kind, value in part._parameters.items() if value is not None}


class _Path(nn.Module):
    """One module inside another, by its name."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, x: Tensor) -> Tensor:
        (inner,) = self._modules.values()
        assert inner is not None
        result: Tensor = inner(x)
        return result


def _alone(part: nn.Module, name: str) -> nn.Module:
    """A linear layer with the parameters of `part`, at the same place in a tree of modules with nothing else in it."""
    weight, bias = part._parameters["weight"], part._parameters.get("bias")
    assert weight is not None
    outputs, inputs = weight.shape[:2]
    layer: nn.Module = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
    # A view of the same memory, so that a change is seen; a parameter itself where it is a matrix already.
    matrix = (
        weight if weight.ndim == 2 else nn.Parameter(weight.detach().reshape(outputs, inputs), weight.requires_grad)
    )
    layer._parameters["weight"] = matrix
    if bias is not None:
        layer._parameters["bias"] = bias
    for step in reversed(name.split(".") if name else []):
        layer = _Path(step, layer)
    return layer


def position_labels(
    labels: Any, leading: tuple[int, ...], classes: int, ignore_index: int, device: torch.device
) -> Int[Tensor, "B *S"]:
    """Labels of all positions, checked: a class number or `ignore_index` each."""
    try:
        values = torch.as_tensor(labels).to(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LabelError(f"Labels are {type(labels).__name__}; expected class numbers of all positions.") from error
    if tuple(values.shape) != leading:
        raise label_shape_error(tuple(values.shape), leading, ignore_index)
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise LabelError(f"Labels are {values.dtype}; expected integers 0 to {classes - 1}, or {ignore_index}.")
    values = values.long()
    named = values[values != ignore_index]
    if named.numel() and not bool(((named >= 0) & (named < classes)).all()):
        raise LabelError(
            f"Labels run from {int(named.min())} to {int(named.max())}; expected 0 to {classes - 1}, because the model "
            f"has {classes} classes, or {ignore_index} for a position that is ignored. If another number stands for no "
            "label, pass ignore_index= to the fit."
        )
    return values


def label_shape_error(actual: tuple[int, ...], leading: tuple[int, ...], ignore_index: int) -> LabelError:
    return LabelError(
        f"Labels have shape {actual}; expected {leading}, one class number for each position, or {ignore_index} where "
        "there is none."
    )


def masked_in(batch: Batch, leading: tuple[int, ...], mask: Tensor | None) -> Bool[Tensor, "B *S"] | None:
    """Which positions an attention mask keeps; None where it says nothing about positions."""
    if mask is None or tuple(mask.shape) != leading:
        return None
    return mask != 0


def with_shapes_of_model(values: Mapping[str, Tensor], network: Network) -> Mapping[str, Tensor]:
    """Parameters by name, in the shapes of the user's model."""
    if not isinstance(network, HeadNetwork):
        return values
    return {name: value.reshape(-1, *network.shape_of(name)) for name, value in values.items()}
