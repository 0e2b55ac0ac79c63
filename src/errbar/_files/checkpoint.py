"""Checkpoints of a fit: the information of the batches so far, and a digest of these batches.

The pass over the data is divided into parts of `every` batches. The information of each part is added to the total, and
the total replaces the file. A fit that continues reads the same data again up to its position, compares their digest,
and goes on with the same additions in the same order: on the same machine its result equals that of an uninterrupted
fit with the same `every` to the last bit, wherever it was killed. Compared with a fit without checkpoints, sums are
only grouped differently, which is rounding (and for `lowrank` one more compression per part, within its bound).

Each of several ranks has its own file, `path.rank-R-of-S`, for its own part of the data: they need not have come
equally far when they were interrupted, and the fit must continue with the same number of ranks.

The digest of k batches is SHA-256(digest of k−1 batches, SHA-256 of batch k): it can be continued from a file.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator

from errbar._base.atomic import file_name, require_writable_folder
from errbar._base.checks import whole_number
from errbar._base.container import read, write
from errbar._base.digest import digest_of
from errbar._curvature.structure import Description
from errbar._curvature.task import Task
from errbar._files.task import information_record, read_information, route_description
from errbar._model.batch import Batch
from errbar._model.network import described_output
from errbar._posterior.information import Information
from errbar.errors import ArgumentError, FileError, MismatchError

Path = str | os.PathLike[str]
_START = "0" * 64


class CountedStream:
    """A stream of batches that counts and digests those taken from it."""

    def __init__(self, stream: Iterator[Batch]) -> None:
        self._stream = stream
        self._ahead = next(stream, None)
        self.batches = 0
        self.digest = _START

    @property
    def at_end(self) -> bool:
        return self._ahead is None

    def part(self, count: int) -> Iterator[Batch]:
        """The next `count` batches, or as many as there are."""
        for _ in range(count):
            batch = self._ahead
            if batch is None:
                return
            self.digest = hashlib.sha256((self.digest + batch_digest(batch)).encode()).hexdigest()
            self.batches += 1
            yield batch
            # Only now, so that no more than one batch is in memory.
            self._ahead = next(self._stream, None)

    def skip(self, path: Path, batches: int, digest: str) -> None:
        """Go to where a checkpoint was written; the data up to there must be the same."""
        for _ in self.part(batches):
            pass
        if self.batches < batches:
            raise MismatchError(
                f"The checkpoint {os.fspath(path)} holds {batches} batches, and the data end after {self.batches}. "
                "Expected the data of the interrupted fit, in the same order; delete the file to start again."
            )
        if self.digest != digest:
            raise MismatchError(
                f"The checkpoint {os.fspath(path)} holds other data: its {batches} batches are not the first of these. "
                "Expected the data of the interrupted fit in the same order (shuffle=False, or the same seed), with "
                "the same batch size; delete the file to start again."
            )


def require_checkpoint(path: Path, every: object, *, rank: int, ranks: int) -> str:
    """The file of this rank; refuses a path that cannot be written to, and other mistakes, early."""
    number = whole_number(every)
    if number is None or number < 1:
        raise ArgumentError(f"every is {every!r}; expected a whole number of batches of one or more.")
    require_writable_folder(path)
    name = file_name(path)
    _require_as_many_ranks(name, ranks)
    return name if ranks == 1 else f"{name}.rank-{rank}-of-{ranks}"


def _require_as_many_ranks(name: str, ranks: int) -> None:
    """Refuse to start beside the checkpoint of another number of ranks, which divided the data differently."""
    folder, base = os.path.split(name)
    pattern = re.compile(re.escape(base) + r"\.rank-\d+-of-(\d+)")
    matches = (pattern.fullmatch(entry) for entry in sorted(os.listdir(folder or os.curdir)))
    ranks_by_file = {match[0]: int(match[1]) for match in matches if match is not None}
    if ranks > 1 and _is_checkpoint(name):
        ranks_by_file[base] = 1
    for file, number in ranks_by_file.items():
        if number != ranks:
            raise MismatchError(
                f"{os.path.join(folder, file)} is from a fit by {number} rank{'s'[: number > 1]}, and this one is by "
                f"{ranks}. Expected as many as the interrupted fit had, because each continues with its own part of "
                "the data; delete the files of that checkpoint to start again."
            )


def _is_checkpoint(name: str) -> bool:
    try:
        return os.path.lexists(name) and read(name, header_only=True).kind == "checkpoint"
    except FileError:
        return False


def store(path: Path, information: Information, stream: CountedStream) -> None:
    description, tensors = information_record(information, None)
    position = {"batches": stream.batches, "digest": stream.digest}
    write(path, "checkpoint", description | {"position": position}, tensors)


def resume(path: Path, task: Task, stream: CountedStream) -> Information | None:
    """The information in a checkpoint, with `stream` moved to its position; None if there is no file yet.

    A checkpoint of another model, of other options or of other data is refused.
    """
    if not os.path.lexists(path):
        return None
    contents = read(path)
    if contents.kind != "checkpoint":
        raise FileError(
            f"{contents.path} holds a saved {contents.kind}, not a checkpoint, and is not overwritten. Choose another "
            "name for the checkpoint."
        )
    checkpoint, _ = read_information(contents)
    for name, current, previous in (
        ("weights of the model", task.network.fingerprint, checkpoint.task.network.fingerprint),
        ("parameters", task.selection, checkpoint.task.selection),
        ("outputs", task.outputs, checkpoint.task.outputs),
        ("fisher", task.fisher, checkpoint.task.fisher),
        ("draws or another seed", task.scores, checkpoint.task.scores),
        ("class_weights", task.class_weights, checkpoint.task.class_weights),
        ("structure", task.structure, checkpoint.task.structure),
        ("precision", task.precision, checkpoint.task.precision),
        ("number of classes", task.n_classes, checkpoint.task.n_classes),
        ("output", described_output(task.network.output), described_output(checkpoint.task.network.output)),
        ("rank", task.rank, checkpoint.task.rank),
        ("layers", _layers(task), _layers(checkpoint.task)),
    ):
        if current != previous:
            raise MismatchError(
                f"The checkpoint {contents.path} is from a fit with other {name}. Expected the model and the options "
                "of the interrupted fit; delete the file to start again."
            )
    position = contents.description.part("position")
    stream.skip(path, position.whole("batches", 1), position.digest("digest"))
    return Information(
        task,
        checkpoint.total.to(task.network.device),
        checkpoint.n_samples,
        checkpoint.log_likelihood,
        checkpoint.seen,
    )


def _layers(task: Task) -> list[Description]:
    return [route_description(route) for route in task.routes]


def batch_digest(batch: Batch) -> str:
    """SHA-256 of the model's arguments, the labels, and the weights of the samples if they have any."""
    weights = () if batch.weights is None else ("weights", batch.weights)
    return digest_of((*batch.args, "keywords", batch.kwargs, "labels", batch.labels, *weights))
