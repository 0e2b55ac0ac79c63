"""What can happen to files: full disks, killed processes, flipped bits, and people who mean harm."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import errbar
import make_format_files
from errbar._base import atomic, container
from errbar.experiments import runs, store
from errbar.plots.curves import new_figure, write_figure
from mutations import sealed
from places import FORMAT_FILES
from processes import environment, script_output

# ------------------------------------------------------------------------------------------------------------ kills


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_whoever_is_killed_while_saving_leaves_a_whole_file(count: int, tmp_path: Path) -> None:
    found = script_output("kill_files.py", "save", count, 1, tmp_path)
    assert found["wrong"] == []
    assert found["kills"] + found["ends"] == count
    assert found["kills"] >= 1 + count // 4


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_a_fit_that_is_killed_at_any_moment_ends_with_the_same_result(count: int, tmp_path: Path) -> None:
    found = script_output("kill_files.py", "fit", count, 1, tmp_path)
    assert found["wrong"] == []
    assert found["kills"] == count
    assert len(found["resumed"]) >= 1 + count // 50


# ------------------------------------------------------------------------------------------------------------- fuzz


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_with_an_error_of_ours_and_without_memory(count: int, tmp_path: Path) -> None:
    found = script_output("fuzz_files.py", count, count, tmp_path)
    assert found["wrong"] == []
    assert found["refused"] + found["read"] == count
    assert found["refused"] > 0.8 * count


def test_every_flipped_bit_of_a_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    data = (FORMAT_FILES / "format-1-diag.safetensors").read_bytes()
    for position in range(0, len(data), 7):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        path.write_bytes(changed)
        with pytest.raises(errbar.FileError, match="file"):
            errbar.verify(path)


@pytest.mark.parametrize(
    "header",
    [
        b'{"__metadata__":[' + b"[]," * 2_000_000 + b"[]]}",
        b'{"__metadata__":{"format":"1","errbar":"","torch":"","kind":"posterior","content":"' + b"0" * 64 + b'",'
        b'"description":"[' + b"[]\\u002c" * 1_000_000 + b'[]]"}}',
    ],
    ids=["in the header", "in the description"],
)
def test_millions_of_values_are_refused_before_they_are_made(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(sealed(header, b""))
    tracemalloc.start()
    try:
        with pytest.raises(errbar.DamagedFileError, match="a description of over 500,000 values"):
            errbar.info(tmp_path / "file")
        assert tracemalloc.get_traced_memory()[1] < 6 * len(header)
    finally:
        tracemalloc.stop()


def redescribe(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The same file with another description, and with checksums that fit."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    description = json.loads(header["__metadata__"]["description"])
    change(description)
    header["__metadata__"]["description"] = json.dumps(description, separators=(",", ":"))
    path.write_bytes(sealed(json.dumps(header).encode(), data[8 + length :]))


def test_a_shape_of_many_dimensions_is_refused_before_they_are_multiplied(tmp_path: Path) -> None:
    """The product of 60 000 dimensions took 25 seconds; half a million fit into a file."""
    path = tmp_path / "file"
    make_format_files.posterior("dense").save(path)
    redescribe(path, lambda description: description["parameters"][0].update(shape=[2**62] * 400_000))
    start = time.monotonic()
    for act in (errbar.info, errbar.verify):
        with pytest.raises(errbar.DamagedFileError, match="more than 64 dimensions"):
            act(path)
    assert time.monotonic() - start < 10


def test_what_could_not_be_read_is_not_written(
    posterior: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, limit in (("_HEADER_LIMIT", 100), ("MOST_VALUES", 10)):
        with monkeypatch.context() as patch:
            patch.setattr(container, name, limit)
            with pytest.raises(errbar.SizeError, match="Select fewer parameters"):
                posterior.save(tmp_path / "file")
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------------------------------- full disks


@pytest.fixture
def posterior() -> errbar.Posterior:
    return make_format_files.posterior("dense")


def failing(function: Callable[..., Any], number: int, code: int) -> Callable[..., Any]:
    """`function`, that fails from its call `number` on."""
    calls = iter(range(10**9))

    def act(*arguments: Any, **options: Any) -> Any:
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return function(*arguments, **options)

    return act


def short(descriptor: int, data: Any) -> int:
    """A disk that takes a few bytes at a time, as `os.write` may."""
    return REAL_WRITE(descriptor, data[:100])


REAL_WRITE = os.write


@pytest.mark.parametrize(
    ("function", "number", "code"),
    [
        ("write", 0, errno.ENOSPC),
        ("write", 1, errno.ENOSPC),
        ("write", 4, errno.EDQUOT),
        ("fsync", 0, errno.ENOSPC),
        ("fsync", 0, errno.EIO),
        ("replace", 0, errno.EACCES),
        ("open", 0, errno.EROFS),
    ],
)
def test_when_the_disk_is_full_the_old_file_is_intact(
    function: str,
    number: int,
    code: int,
    posterior: errbar.Posterior,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "file"
    posterior.save(path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, function, failing(getattr(os, function), number, code))
        with pytest.raises(
            errbar.FileError, match=f"Cannot write .*file: {os.strerror(code)}.*previous file, if any, is unchanged"
        ):
            posterior.with_prior(errbar.Prior(9.0)).save(path, factors=True)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_takes_few_bytes_at_a_time_gets_all_of_them(
    posterior: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic.os, "write", short)
    posterior.save(tmp_path / "file", factors=True)
    assert errbar.verify(tmp_path / "file").has_factors


def test_an_interrupt_leaves_nothing_behind(
    posterior: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt("by hand")

    monkeypatch.setattr(atomic.os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        posterior.save(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_a_file_system_that_cannot_synchronise_folders_is_fine(
    posterior: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic.os, "fsync", failing(os.fsync, 1, errno.EINVAL))
    posterior.save(tmp_path / "file")
    assert errbar.verify(tmp_path / "file").kind == "posterior"


def test_a_folder_that_does_not_reach_the_disk_is_not_said_to_be_unchanged(
    posterior: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic.os, "fsync", failing(os.fsync, 1, errno.EIO))
    with pytest.raises(errbar.FileError, match=r"^A new file is in .* could not be made durable on the disk"):
        posterior.save(tmp_path / "file")
    assert errbar.verify(tmp_path / "file").kind == "posterior"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_fine_and_nothing_is_removed_there(
    code: int, posterior: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre answers without the option `flock`: whose the other temporary file is cannot be known."""

    def refused(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(atomic.fcntl, "flock", refused)
    (tmp_path / ".file.99-0.tmp").write_bytes(b"of another writer, perhaps")
    posterior.save(tmp_path / "file")
    assert errbar.verify(tmp_path / "file").kind == "posterior"
    assert sorted(os.listdir(tmp_path)) == [".file.99-0.tmp", "file"]


def test_where_only_files_open_for_writing_can_be_locked_left_overs_are_no_obstacle(
    posterior: errbar.Posterior, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS."""
    real = fcntl.flock

    def picky(descriptor: int, operation: int) -> None:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(descriptor, operation)

    monkeypatch.setattr(atomic.fcntl, "flock", picky)
    (tmp_path / ".file.99-0.tmp").write_bytes(b"left over")
    posterior.save(tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


# --------------------------------------------------------------------------------------------------- where it is put


def test_paths_that_cannot_be_written_to_are_refused(posterior: errbar.Posterior, tmp_path: Path) -> None:
    for name in (5, b"file", "a\0b", ""):
        with pytest.raises(errbar.ArgumentError, match=r"path is .*; expected the name of a file"):
            posterior.save(name)  # type: ignore[arg-type]
    with pytest.raises(errbar.FileError, match="it is a folder; expected the name of a file"):
        posterior.save(tmp_path)
    with pytest.raises(errbar.FileError, match=r"No such file or directory.* expected a folder that exists"):
        posterior.save(tmp_path / "missing" / "file")


def test_through_a_link_the_file_is_replaced_and_not_the_link(posterior: errbar.Posterior, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "file")
    posterior.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert errbar.verify(tmp_path / "elsewhere" / "file").kind == "posterior"


def special_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """A name for each kind of file that is not regular, directly and through a link, and what it is called."""
    os.mkfifo(folder / "pipe.png")
    with socket.socket(socket.AF_UNIX) as listener:
        # A path of a socket has a hundred characters at most.
        here = os.open(folder, os.O_RDONLY)
        try:
            listener.bind(f"/proc/self/fd/{here}/socket.png")
        finally:
            os.close(here)
    # A terminal of our own, where no file can be made: a test that fails must not take /dev/null away.
    first, second = os.openpty()
    try:
        for name, kind in (("pipe.png", "pipe"), ("socket.png", "socket"), (os.ttyname(second), "device")):
            link = folder / f"link to {kind}.png"
            link.symlink_to(folder / name)
            yield folder / name, kind
            yield link, kind
    finally:
        os.close(first)
        os.close(second)


def test_only_regular_files_are_replaced(posterior: errbar.Posterior, tmp_path: Path) -> None:
    model, data = make_format_files.model(), make_format_files.data()
    writers: dict[str, Callable[[Path], object]] = {
        "posterior": posterior.save,
        "information": posterior.information.save,
        "checkpoint": lambda path: errbar.collect(model, data, last_layers=1, checkpoint=path, every=1),
        "bytes": lambda path: atomic.write_file(path, b"new"),
        "run": lambda path: runs.write(path, {"a": 1}),
        "network": lambda path: store._save(path, {}, nn.Linear(2, 2)),
        "figure": lambda path: write_figure(new_figure((1, 1)), path),
    }
    for path, kind in special_files(tmp_path):
        before, there = os.stat(path), os.listdir(tmp_path)
        for name, write in writers.items():
            if name == "figure" and not path.suffix:
                continue  # which says what is to be drawn
            with pytest.raises(errbar.FileError, match=rf"Cannot write .*: it is a {kind}, .* expected a new name"):
                write(path)
        assert os.path.samestat(os.stat(path), before)
        assert sorted(os.listdir(tmp_path)) == sorted(there)


def test_a_pipe_that_appears_while_a_file_is_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def late() -> None:
        with atomic.replacing(path) as descriptor:
            atomic.write_all(descriptor, b"new")
            os.mkfifo(path)

    with pytest.raises(errbar.FileError, match="it is a pipe"):
        late()
    assert stat.S_ISFIFO(os.lstat(path).st_mode)
    assert os.listdir(tmp_path) == ["file"]


def test_the_standard_output_is_refused_where_it_is_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from errbar._base.atomic import write_file; write_file('/dev/stdout', b'new')"],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.stdout == ""
    assert "errbar.errors.FileError: Cannot write /dev/stdout: it is a pipe" in done.stderr


def test_what_a_killed_writer_left_is_removed_and_what_a_writer_holds_is_not(
    posterior: errbar.Posterior, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    (tmp_path / ".file.99-0.tmp").write_bytes(b"left over")
    (tmp_path / ".file2.99-0.tmp").write_bytes(b"another file's")
    with atomic.replacing(path) as descriptor:
        atomic.write_all(descriptor, b"mine")
        (held,) = (name for name in os.listdir(tmp_path) if name.startswith(f".file.{os.getpid()}"))
        posterior.save(path)
        assert sorted(os.listdir(tmp_path)) == sorted([held, "file", ".file2.99-0.tmp"])
    assert path.read_bytes() == b"mine"
    assert sorted(os.listdir(tmp_path)) == [".file2.99-0.tmp", "file"]


def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    posteriors = [make_format_files.posterior("dense").with_prior(errbar.Prior(1.0 + i)) for i in range(4)]
    failures: list[BaseException] = []

    def work(posterior: errbar.Posterior) -> None:
        try:
            for _ in range(20):
                posterior.save(tmp_path / "file")
                errbar.verify(tmp_path / "file")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(posterior,)) for posterior in posteriors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == ["file"]


def test_kronecker_factors_of_layers_that_are_not_taken_apart_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_format_files.posterior("kron").save(path)
    redescribe(path, lambda description: description["plan"].update(factored=True))
    with pytest.raises(errbar.DamagedFileError, match="describes layers that do not fit its parameters"):
        errbar.info(path)
