"""The user's model, looked at without being touched.

Every call runs on a *replica*: a second tree of module objects that shares the parameters and buffers of the
user's model but has its own mode and hooks, in eval mode. So the user's train/eval mode, gradients and hooks never
change, not even when a call fails, and threads do not disturb each other: each has a replica of its own.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_pre_hook

from errbar._base.checks import Checks, whole_number
from errbar._base.speed import timed
from errbar._model.batch import Batch, Kept
from errbar._model.convolutions import ConvolutionInputs, has_own_forward
from errbar._model.outputs import CLASSES, OutputKind
from errbar.errors import ArgumentError, DataError, ErrbarError, ModelError, WeightsChangedError

# Which part of what a model returns are the logits: a position, a key, a function, or None for all of it.
Output = int | str | Callable[[Any], Any] | None


def unwrap(model: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel, DataParallel and torch.compile wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def replicate(module: nn.Module) -> nn.Module:
    """A tree of new module objects around the same tensors.

    `copy.deepcopy` would follow references out of the tree (a trainer, a data set); here only modules and the
    containers that hold them are new. Bound methods kept as attributes are bound to the new modules, and compiled
    modules run as they were written.
    """
    clones: dict[int, nn.Module] = {}

    def clone(original: nn.Module) -> nn.Module:
        if id(original) in clones:
            return clones[id(original)]
        kind = _Uncompiled if isinstance(original, torch._dynamo.OptimizedModule) else original.__class__
        # A traced graph has a class of its own, which holds its code; __new__ would make another one.
        new = object.__new__(kind) if isinstance(original, torch.fx.GraphModule) else kind.__new__(kind)
        clones[id(original)] = new
        attributes = {
            name: _copied(value) if isinstance(value, (dict, list, set)) else value
            for name, value in original.__dict__.items()
        }
        attributes["_compiled_call_impl"] = None
        if kind is _Uncompiled:
            attributes.pop("forward", None)
        if isinstance(original, (nn.Embedding, nn.EmbeddingBag)):
            # The same numbers; sparse gradients are for optimisers.
            attributes["sparse"] = False
        attributes["_modules"] = {
            name: None if child is None else clone(child) for name, child in original._modules.items()
        }
        new.__dict__.update(attributes)
        return new

    root = clone(module)
    for new in clones.values():
        for name, value in new.__dict__.items():
            if name not in ("_modules", "_parameters", "_buffers"):
                new.__dict__[name] = _with_clones(value, clones)
    return root


def _copied(value: Any) -> Any:
    # The own method of the plain ones: `copy.copy` takes ten times as long, and a network has thousands of them.
    return value.copy() if type(value) in (dict, list, set, OrderedDict) else copy.copy(value)


def _with_clones(value: Any, clones: dict[int, nn.Module]) -> Any:
    """`value` with clones in place of the modules that it is, holds in plain containers, or is a method of."""
    if id(value) in clones:
        return clones[id(value)]
    if isinstance(value, MethodType) and id(value.__self__) in clones:
        return MethodType(value.__func__, clones[id(value.__self__)])
    if type(value) in (list, tuple):
        return type(value)(_with_clones(part, clones) for part in value)
    if type(value) is dict:
        return {key: _with_clones(part, clones) for key, part in value.items()}
    return value


class _Uncompiled(nn.Module):
    """Stands in for a compiled module inside the model: calls the module that was compiled."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)  # type: ignore[operator]


def _weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and persistent buffers, with their names: what a state dict holds."""
    weights: list[tuple[str, Tensor]] = list(module.named_parameters())
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                weights.append((f"{prefix}.{name}" if prefix else name, buffer))
    return weights


def _tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of `_weights`, shared ones once for each module, in an order of their own.

    They are looked at before every prediction, and the names would take most of that time.
    """
    tensors: list[Tensor] = []
    parts: dict[int, nn.Module] = {id(module): module}
    waiting = [module]
    while waiting:
        part = waiting.pop()
        tensors += [parameter for parameter in part._parameters.values() if parameter is not None]
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                tensors.append(buffer)
        for child in part._modules.values():
            if child is not None and id(child) not in parts:
                parts[id(child)] = child
                waiting.append(child)
    return tensors


def fingerprint(module: nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of the weights."""
    digest = hashlib.sha256()
    for name, tensor in _weights(module):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


_EXPORTED = (
    "The model came out of torch.export, which fixes its mode and the sizes of its inputs; expected a torch.nn.Module "
    "as it was written. Pass the module that was exported."
)


def _is_exported(part: nn.Module) -> bool:
    """Whether a module is what `torch.export` made: a graph that refuses eval(), or one put into modules again."""
    refuses_modes = isinstance(part, torch.fx.GraphModule) and "eval" in part.__dict__
    return refuses_modes or type(part).__module__.startswith("torch.export.")


class Network:
    """A model that refuses to run once its weights have changed.

    `output` says where the logits are in what it returns, and `kind` what they mean.
    """

    # False for a network that was read from a file without its model.
    has_model = True
    # Whether results keep the graph that leads to the inputs (`_model.fixed`).
    keeps_graph = False

    def __init__(
        self, model: nn.Module, output: Output = None, kind: OutputKind = CLASSES, *, marked: bool = True
    ) -> None:
        """With `marked` the weights are known again by their fingerprint, which takes a pass over all of them."""
        self.output = require_output(output)
        self.kind = kind
        if isinstance(model, torch.export.ExportedProgram):
            raise ArgumentError(_EXPORTED)
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model is a {type(model).__name__}; expected a torch.nn.Module.")
        self.model = model
        self.module = unwrap(model)
        self._require_usable()
        self.fingerprint = fingerprint(self.module) if marked else ""
        self.device = next(self.module.parameters()).device
        kinds = {p.dtype for p in self.module.parameters() if p.is_floating_point()}
        self.input_dtype = kinds.pop() if len(kinds) == 1 else None
        self.dtype = torch.float64 if self.input_dtype == torch.float64 else torch.float32
        self._seen = [(tensor, tensor._version, tensor.dtype) for tensor in _tensors(self.module)]
        self._local = threading.local()
        # Of which costs the user has been told: once is enough.
        self.told: set[str] = set()

    def _require_usable(self) -> None:
        if isinstance(self.module, torch.jit.ScriptModule):
            raise ModelError("The model is a ScriptModule; expected a plain torch.nn.Module. Pass the original.")
        parameters = list(self.module.parameters())
        if not parameters:
            raise ModelError("The model has no parameters; expected a trained classifier.")
        if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters):
            raise ModelError("The model has uninitialized lazy parameters; run it once, and train it, before the fit.")
        if any(tensor.is_meta for _, tensor in _weights(self.module)):
            raise ModelError(
                "The model has weights on the meta device, which hold no numbers; expected a trained classifier. Load "
                "its weights, with to_empty() and load_state_dict(..., assign=True), before the fit."
            )
        if any(_is_exported(part) for part in self.module.modules()):
            raise ModelError(_EXPORTED)
        if any(p.is_inference() for p in parameters):
            raise ModelError(
                "The model was made under torch.inference_mode(), so nothing can be differentiated by its weights; "
                "make it outside, or pass copy.deepcopy(model) made outside."
            )
        for name, part in self.module.named_modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.running_mean is None:
                raise ModelError(
                    f"'{name}' is a {type(part).__name__} without running statistics: it normalises by the batch, so "
                    "one input's result depends on the others. Expected track_running_stats=True."
                )

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the model and count its versions from then on."""
        return {"model": self.model, "output": self.output, "kind": self.kind}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def require_unchanged(self) -> None:
        """Raise unless every weight is the tensor it was, at the version it had, on the device it was on."""
        tensors = _tensors(self.module)
        if next(self.module.parameters()).device != self.device:
            raise WeightsChangedError(
                f"The model moved from {self.device} to {next(self.module.parameters()).device} since the fit; "
                "call posterior.to(device) to move the posterior as well."
            )
        is_same = len(tensors) == len(self._seen) and all(
            tensor is original and tensor._version == version and tensor.dtype == dtype
            for tensor, (original, version, dtype) in zip(tensors, self._seen, strict=True)
        )
        if not is_same:
            raise WeightsChangedError(
                "The model's weights changed since the fit, so the posterior no longer describes this model. "
                "Fit again, or fit on a copy (copy.deepcopy) before you train further."
            )

    def same_weights(self, other: Network) -> bool:
        return self.fingerprint == other.fingerprint

    def replica(self) -> nn.Module:
        """This thread's replica, in eval mode."""
        replica: nn.Module | None = getattr(self._local, "replica", None)
        if replica is None:
            replica = self._local.replica = replicate(self.module).eval()
        return replica

    def prepare(self, batch: Batch, checks: Checks) -> Batch:
        """The batch on the model's device and in its dtype; `DataError` for NaN, infinite or no input."""
        if len(batch) == 0:
            raise DataError("A batch holds no samples; expected at least one.")
        if batch.by_name:
            batch = self._with_its_arguments(batch)

        def move(tensor: Tensor) -> Tensor:
            dtype = self.input_dtype if tensor.is_floating_point() else None
            given = tensor if self.keeps_graph else tensor.detach()
            copy_on_device = given.to(device=self.device, dtype=dtype)
            return copy_on_device.clone() if copy_on_device.is_inference() else copy_on_device

        prepared_batch = batch.map(move)
        for value in prepared_batch.tensors():
            if value.is_floating_point():
                checks.require(
                    torch.isfinite(value).all(),
                    lambda: DataError(
                        "An input holds NaN or infinite values; expected finite numbers. Remove or impute it."
                    ),
                )
        return prepared_batch

    def _with_its_arguments(self, batch: Batch) -> Batch:
        """A mapping with `weights`: an argument of the model if its forward takes one of that name."""
        parameters = inspect.signature(type(self.module).forward).parameters
        if "weights" in parameters:
            return replace(batch, kwargs={**batch.kwargs, "weights": batch.weights}, weights=None, by_name=False)
        if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            raise DataError(
                "A batch has 'weights', and the model takes any keyword, so they may be an argument of it or the "
                "weights of the samples. Expected unpack=, a function from a batch to (args, kwargs, labels), or to "
                "(args, kwargs, labels, weights) where samples are weighted."
            )
        return batch

    def logits(self, batch: Batch, values: Mapping[str, Tensor] | None = None) -> Float[Tensor, "B M"]:
        """g(x; θ) in the network's own dtype, with the parameters in `values` put in place of the model's own."""
        if values is None:
            return self.as_logits(run(self.replica(), batch), len(batch))
        result = functional_call(self.replica(), dict(values), batch.args, batch.kwargs)
        return self.as_logits(result, len(batch))

    def as_logits(self, result: Any, size: int) -> Float[Tensor, "B M"]:
        """The logits in what the model returned for a batch of `size`."""
        return as_logits(result, size, self.output, self.kind)

    def prepare_whole(self, batch: Batch, checks: Checks) -> Batch:
        """`prepare`, for a call of the whole model: where only its last layer is looked at, the inputs differ."""
        return self.prepare(batch, checks)

    def on_other(self, model: nn.Module) -> Network:
        """The same view of another model."""
        return type(self)(model, self.output, self.kind)

    def observed(self, batch: Batch) -> Observation:
        """One pass of a prepared batch through all modules, noting each call as it ends."""
        replica = replicate(self.module).eval()
        size = len(batch)
        events: list[Event] = []
        # Weakly, so that no more is held than the pass itself holds.
        last: dict[str, weakref.ref[Tensor]] = {}
        own_ways = {name for name, part in replica.named_modules() if has_own_forward(part)}
        convolutions, unlike = ConvolutionInputs(), set()

        def note(name: str) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                is_tensor = isinstance(output, Tensor)
                if name in own_ways and convolutions.taken(module, output) is None:
                    unlike.add(name)
                events.append(Event(name, output.numel() // size if is_tensor else 0, time.perf_counter() - start))
                if is_tensor:
                    last[name] = weakref.ref(output)

            return hook

        for name, part in replica.named_modules():
            part.register_forward_hook(note(name))
        with _refused({id(part) for part in self.module.modules()}):
            start = time.perf_counter()
            with convolutions if own_ways else nullcontext():
                result, seconds = timed(lambda: run(replica, batch), self.device)
        logits = self.as_logits(result, size)
        returning = frozenset(name for name, output in last.items() if output() is logits)
        return Observation(logits, tuple(events), returning, seconds, frozenset(unlike))


@dataclass(frozen=True)
class Event:
    """The end of one call of a module: the size of the tensor that it returned, per sample, and the time."""

    module: str
    outputs: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Observation:
    """The record of one pass; `returning` names the modules that last returned the logits themselves, `unlike` the
    convolutions with a forward of their own that do something else than a convolution."""

    logits: Float[Tensor, "B M"]
    events: tuple[Event, ...]
    returning: frozenset[str]
    seconds: float
    unlike: frozenset[str] = frozenset()

    @property
    def order(self) -> list[str]:
        """Names of the modules in the order in which they last finished."""
        last = dict.fromkeys(event.module for event in reversed(self.events))
        return list(reversed(last))


@contextmanager
def _refused(modules: set[int]) -> Iterator[None]:
    """Raise when one of the user's own module objects runs in this thread, in place of its replica.

    A closure over a module cannot be redirected: the module would run in the user's mode, with the user's weights.
    """
    thread = threading.get_ident()

    def hook(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread and id(module) in modules:
            raise ModelError(
                f"The model calls one of its modules ({type(module).__name__}) through a closure or a reference from "
                "outside, which errbar cannot follow without touching the model; call it as an attribute (self.layer)."
            )

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def run(module: nn.Module, batch: Batch, values: Mapping[str, Tensor] | None = None) -> Any:
    """The model's output, with the parameters in `values` in place of its own.

    An error inside the model is raised with the shapes of its inputs.
    """
    try:
        if values is not None:
            return functional_call(module, dict(values), batch.args, batch.kwargs)
        return module(*batch.args, **batch.kwargs)
    except (ErrbarError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        inputs = [f"{tuple(value.shape)} {value.dtype}" for value in batch.tensors()]
        raise DataError(
            f"The model failed on a batch with {', '.join(inputs)}: {error}. Expected inputs as in training; check "
            "their shape and dtype, or pass unpack= if the batch holds something else."
        ) from error


def require_output(output: object) -> Output:
    """What `output=` may be, as a network keeps it."""
    if output is None or isinstance(output, (str, Kept)):
        return output
    position = whole_number(output)
    if position is not None:
        return position
    if not callable(output):
        raise ArgumentError(
            f"output is {output!r}; expected where in the model's output the logits are: a position, a key or a "
            "function of it, or None if it is all of it."
        )
    return Kept(output, "output")


def described_output(output: Output) -> str:
    """An `output` in words that can be compared; functions cannot be told apart."""
    if output is None:
        return "all of it"
    return "a function" if callable(output) else f"key {output!r}" if isinstance(output, str) else f"position {output}"


def picked(result: Any, output: Output) -> Any:
    """The logits in a model's result; `ModelError` if they are not where `output` says."""
    if output is None:
        return getattr(result, "logits", result)
    kind = type(result).__name__
    try:
        if callable(output):
            return output(result)
        if isinstance(output, str):
            return result[output] if isinstance(result, Mapping) else getattr(result, output)
        if not isinstance(result, Tensor):
            return result[output] if isinstance(result, Sequence) else _values(result)[output]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if callable(output):
            raise ModelError(
                f"The function output= failed on what the model returned, {kind} ({type(error).__name__}: {error}); "
                "expected one that returns the logits."
            ) from error
        raise ModelError(
            f"The model returned {_contents(result)}, and output={output!r} is not in it; expected the position or "
            "the key of the logits."
        ) from error
    raise ModelError(
        f"The model returned a tensor of shape {tuple(result.shape)}, and output={output!r} picks one of several; "
        "leave output= out, or give a function."
    )


def _values(result: Any) -> tuple[Any, ...]:
    """The values of a mapping, in its order; those of an output of transformers that are not None."""
    return tuple(result.values())


def _contents(result: Any) -> str:
    kind = type(result).__name__
    if isinstance(result, Mapping):
        return f"{kind} with the keys {', '.join(map(repr, result))}"
    return f"{kind} of {len(result)}" if isinstance(result, Sequence) else kind


def as_logits(result: Any, size: int, output: Output = None, kind: OutputKind = CLASSES) -> Float[Tensor, "B M"]:
    """The (B, M) logits in a model's result, as `kind` reads them: with classes, one logit g is the pair (0, g)."""
    value = picked(result, output)
    logits = getattr(value, "logits", value)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"The model returned {_contents(value)}; expected logits of shape (batch, classes), or an object with "
            ".logits. Say where they are with output=: a position, a key, or a function of what it returns."
        )
    return kind.logits_of(logits, size)


def require_finite_logits(logits: Float[Tensor, "B M"], checks: Checks) -> None:
    checks.require(
        torch.isfinite(logits).all(),
        lambda: ModelError(
            "The model returned NaN or infinite logits for a finite input. Check its weights, or use a wider dtype "
            "(float16 overflows at 65504)."
        ),
    )
