"""The processes of a `torch.distributed` job that compute together: how they agree, fail together, and send tensors.

Nothing here knows of data or mathematics. Words of this file:

- a *team* is the ranks of one call: all of the job, those of a group, or this process alone, which costs nothing;
- a *step* (`Team.together`) is what each rank does by itself. It ends when all ranks have reported how it went. So an
  error on one of them is raised by all, and no rank waits for one that has given up;
- a *notice* in the job's store tells the others of an error while they are still busy (`Team.watched`).

Ranks exchange plain values (numbers, text, tensors), never code.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch import distributed as dist

from errbar import errors
from errbar.errors import ArgumentError, ErrbarError, MismatchError, RankError

if dist.is_available():
    # Differentiating imports it, and its functions have the job's group as a default. Imported during a job, they hold
    # the group to the end of the process, whose threads then outlive the interpreter and abort it now and then.
    import_module("torch.distributed.nn.functional")

Result = TypeVar("Result")

# How often a busy rank checks whether another one failed; a query of the store takes a tenth of a millisecond.
_LOOK_SECONDS = 0.5


class _StoppedError(Exception):
    """This rank stopped because another one had failed."""


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks of one call, in which this one is number `rank` of `size`.

    `group` is None for all ranks of the job: a reference to their group would keep its threads alive after the job, and
    these abort a process that ends meanwhile. `call` identifies one call of the job, for notices in the store.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    call: str = ""

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that shows progress and takes decisions for all."""
        return self.rank == 0

    # ----------------------------------------------------------------------------------------- steps and agreement

    def together(self, step: Callable[[], Result]) -> Result:
        """`step()`, once all ranks have done theirs; an error on one of them is raised by all.

        The rank where it happened raises the error itself, the others one of the same type with the same sentence, or a
        `RankError` if the type is not one of errbar's.
        """
        if self.is_alone:
            return step()
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:
            failure = error
        report = None if failure is None else (_kind(failure), str(failure), dict(getattr(failure, "arguments", {})))
        try:
            if failure is not None and not isinstance(failure, _StoppedError):
                self._leave_notice()
            everyone = self.exchange(report)
        except RankError:
            if failure is not None and not isinstance(failure, _StoppedError):
                raise failure from None
            raise
        if failure is not None and not isinstance(failure, _StoppedError):
            raise failure
        for rank, failure_there in enumerate(everyone):
            if failure_there is not None and failure_there[0] != _StoppedError.__name__:
                raise _error_of(rank, *failure_there)
        return result

    def watched(self, items: Iterator[Result]) -> Iterator[Result]:
        """`items`, which stop soon after another rank has failed; for use within a step."""
        if self.is_alone:
            yield from items
            return
        last_look = time.monotonic()
        for item in items:
            yield item
            if time.monotonic() - last_look > _LOOK_SECONDS:
                if self._call("look for notices", lambda: _store().check([self._notice])):
                    raise _StoppedError
                last_look = time.monotonic()

    def require_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks whose facts differ: all raise the same `MismatchError`."""
        if self.is_alone:
            return
        everyone = self.exchange(dict(facts))
        for rank, facts_there in enumerate(everyone):
            for name, value in everyone[0].items():
                if facts_there[name] != value:
                    raise MismatchError(
                        f"The ranks disagree about the {name}: rank 0 has {_shortened(value)}, rank {rank} has "
                        f"{_shortened(facts_there[name])}. Expected the same call on all ranks.{_ADVICE.get(name, '')}"
                    )

    def _leave_notice(self) -> None:
        self._call("leave a notice", lambda: _store().set(self._notice, "failed"))

    @property
    def _notice(self) -> str:
        return f"errbar/{self.call}/failed"

    # ------------------------------------------------------------------------------------------------ what is sent

    def exchange(self, value: Any) -> list[Any]:
        """The plain values of all ranks, in the order of ranks."""
        if self.is_alone:
            return [value]
        everyone: list[Any] = [None] * self.size
        self._call("exchange values", lambda: dist.all_gather_object(everyone, value, group=self.group))
        return everyone

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The plain value of rank `source`."""
        if self.is_alone:
            return value
        box = [value]
        self._call("broadcast a value", lambda: dist.broadcast_object_list(box, self._global(source), self.group))
        return box[0]

    def summed(self, values: Float[Tensor, "*size"]) -> Float[Tensor, "*size"]:
        """Σ over the ranks; every rank has the same bits."""
        message = values.to(self._carrier(values.device), copy=True, memory_format=torch.contiguous_format)
        self._call("sum", lambda: dist.all_reduce(message, group=self.group))
        return message.to(values.device)

    def shared(self, values: Tensor, source: int) -> Tensor:
        """The tensor of rank `source`; the others pass one of its shape and dtype, whatever it holds."""
        message = values.to(self._carrier(values.device)).contiguous()
        self._call("broadcast", lambda: dist.broadcast(message, self._global(source), group=self.group))
        return message.to(values.device)

    def brought_to_the_first(self, values: Tensor, source: int) -> Tensor:
        """On rank 0 the tensor of rank `source`, whose shape and dtype `values` must have there; elsewhere `values`."""
        if source == 0 or self.rank not in (0, source):
            return values
        message = values.to(self._carrier(values.device)).contiguous()
        if self.rank == source:
            self._call("send", lambda: dist.send(message, self._global(0), group=self.group))
        else:
            self._call("receive", lambda: dist.recv(message, self._global(source), group=self.group))
        return message.to(values.device)

    def gathered(self, parts: Mapping[str, Tensor] | None, device: torch.device) -> dict[str, Tensor]:
        """The rows of all ranks under each name, one rank after the other; None for a rank that has nothing."""
        layout = None if parts is None else {name: (tuple(t.shape), t.dtype) for name, t in parts.items()}
        everyone = self.exchange(layout)
        tensors: dict[str, list[Tensor]] = {}
        for rank, layout_there in enumerate(everyone):
            for name, (shape, dtype) in (layout_there or {}).items():
                if rank == self.rank and parts is not None:
                    part = parts[name]
                else:
                    part = torch.empty(shape, dtype=dtype, device=device)
                tensors.setdefault(name, []).append(self.shared(part, rank))
        return {name: torch.cat(rows) for name, rows in tensors.items()}

    def _carrier(self, device: torch.device) -> torch.device:
        """Where a tensor has to lie to be sent: NCCL sends from a GPU, gloo here always from the CPU."""
        backends = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        if device.type != "cpu" and backends.get(device.type, "gloo") != "gloo":
            return device
        return torch.device("cpu") if "cpu" in backends else torch.device("cuda", torch.cuda.current_device())

    def _global(self, rank: int) -> int:
        return rank if self.group is None else int(dist.get_global_rank(self.group, rank))

    def _call(self, action: str, function: Callable[[], Result]) -> Result:
        """Run `function`; a RuntimeError of torch.distributed means that another rank is gone."""
        try:
            return function()
        except RuntimeError as error:
            raise RankError(
                f"Rank {self.rank} of {self.size} could not {action}: another rank died, left the collective call, or "
                "did not answer within the timeout of the group. Look for the first error among the ranks; all of "
                f"them have to make the same call. torch.distributed says: {error}"
            ) from error


def team_of(group: Any = None) -> Team:
    """None: all ranks of the job where one is initialised, else this process; False: this process; or a ProcessGroup.

    With more than one rank this is a collective call, as is everything that a team does.
    """
    is_running = dist.is_available() and dist.is_initialized()
    if group is False or (group is None and not is_running):
        return Team()
    process_group = group
    if group is None:
        group = dist.group.WORLD
    is_group = is_running and isinstance(group, dist.ProcessGroup)
    if is_running and (group == dist.GroupMember.NON_GROUP_MEMBER or (is_group and dist.get_rank(group) < 0)):
        raise ArgumentError(
            "group does not contain this process; expected a ProcessGroup that it is a member of, None for all ranks "
            "of the job, or False for this process alone."
        )
    if not is_group:
        raise ArgumentError(
            f"group is {group!r}; expected None for all ranks of the job, False for this process alone, or a "
            "ProcessGroup of an initialised torch.distributed job."
        )
    team = Team(dist.get_rank(group), dist.get_world_size(group), process_group)
    if team.is_alone:
        return Team()
    return replace(team, call=team.broadcast(f"{os.getpid()}-{time.monotonic_ns()}"))


_ADVICE = {
    "weights (fingerprint)": (
        " Load the same checkpoint on all of them; running statistics differ between the ranks of "
        "DistributedDataParallel after training, and are made equal by torch.distributed.broadcast of the buffers."
    )
}


def _kind(failure: Exception) -> str:
    """The name of its type, or of the most specific base class among errbar's own errors."""
    names = (kind.__name__ for kind in type(failure).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return next(names, type(failure).__name__)


def _error_of(rank: int, kind: str, sentence: str, arguments: dict[str, object]) -> ErrbarError:
    """The error of another rank, by the name of its type."""
    error_type = getattr(errors, kind, None)
    if isinstance(error_type, type) and issubclass(error_type, ErrbarError):
        return error_type(f"On rank {rank}: {sentence}", arguments=arguments)
    return RankError(f"Rank {rank} failed with {kind}: {sentence}")


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:50]} … {text[-40:]}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


@contextmanager
def job_of_torchrun(device: torch.device) -> Iterator[None]:
    """Join the job for which torchrun started this process, and leave it at the end; does nothing without torchrun.

    Values and CPU tensors go by gloo; tensors of a GPU by NCCL where torch has it.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()) or dist.is_initialized():
        yield
        return
    by_nccl = device.type == "cuda" and dist.is_nccl_available()
    if device.type == "cuda":
        # "cuda" without a number is the GPU of this rank on its machine.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if device.index is None else device)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if by_nccl else "gloo")
    except (RuntimeError, ValueError) as error:
        raise RankError(
            f"The job of torchrun could not be joined: {error}. Expected its address to be reachable from all ranks."
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()
