"""Atomic replacement of files: whatever happens, a reader finds the old file or the new one, never half of one.

The new content goes into a temporary file beside the target, which is synchronised to the disk before it takes the
target's name. After an error, such as a full disk, the temporary file is removed; a killed process cannot do that. So
each writer holds a lock on its temporary file, which the system drops when the process ends, and the next writer of the
same target removes temporary files that are not locked. On file systems without locks such files stay.

Only regular files are replaced: replacing a pipe, a socket or a device would remove it, and nobody would read the file.
They are refused, also through symbolic links (/dev/stdout).
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from errbar.errors import ArgumentError, FileError

if sys.platform != "win32":
    import fcntl

_COUNTER = count()
# Errors of file systems that do not synchronise directories, and of those without locks (some on clusters).
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
_SPECIAL = {
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


def file_name(path: object) -> str:
    """The name of a file as text; refuses anything else."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(name, str) or not name or "\0" in name:
        raise ArgumentError(f"path is {path!r}; expected the name of a file.")
    return name


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor to write to; the content replaces `path` when the block ends without an error."""
    name = file_name(path)
    try:
        # Through a symbolic link the file is replaced, not the link.
        target = Path(os.path.realpath(name))
        _require_replaceable(name)
        _remove_left_over(target)
        descriptor, temporary = _create(target)
        try:
            yield descriptor
            os.fsync(descriptor)
            _require_replaceable(name)
            os.replace(temporary, target)
            _synchronise_folder(target.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"Cannot write {path}: {error.strerror or error}. The previous file, if any, is unchanged; expected a "
            "folder that exists, is writable, and has room."
        ) from error


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically, replacing the one that is there, if any."""
    with replacing(path) as descriptor:
        write_all(descriptor, data)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """`os.write` until everything is written, because one call may write only a part."""
    rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def require_writable_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a file that could not be written later, before hours are spent on computing its content."""
    name = file_name(path)
    _require_replaceable(name)
    folder = Path(os.path.realpath(name)).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise FileError(f"Cannot write {path}: expected a folder {folder} that exists and is writable.")


def _require_replaceable(name: str) -> None:
    """Refuse the name of something that is not a regular file."""
    try:
        # The name as given: the system follows links that `realpath` cannot read (/dev/stdout to a pipe).
        mode = os.stat(name).st_mode
    except OSError:
        return  # nothing is there, or it cannot be reached: writing will say what is wrong
    if stat.S_ISDIR(mode):
        raise FileError(f"Cannot write {name}: it is a folder; expected the name of a file.")
    if not stat.S_ISREG(mode):
        kind = _SPECIAL.get(stat.S_IFMT(mode), "special file")
        raise FileError(
            f"Cannot write {name}: it is a {kind}, which a file would replace; expected a new name or that of a "
            "regular file. Write to a file, and copy that."
        )


def _create(target: Path) -> tuple[int, Path]:
    """A new locked file beside the target."""
    while True:
        temporary = target.with_name(f".{target.name}.{os.getpid()}-{next(_COUNTER)}.tmp")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        try:
            descriptor = os.open(temporary, flags, 0o666)
        except FileExistsError:
            continue
        try:
            # Between the two calls another writer may have mistaken it for a leftover and removed it.
            free = _locked(descriptor) is not False
            if free and os.path.samestat(os.fstat(descriptor), os.stat(temporary)):
                return descriptor, temporary
        except FileNotFoundError:
            pass
        os.close(descriptor)


def _remove_left_over(target: Path) -> None:
    """Remove temporary files of killed writers: those that can be locked."""
    if sys.platform == "win32":
        return
    prefix = f".{target.name}."
    for entry in os.scandir(target.parent):
        if entry.name.startswith(prefix) and entry.name.endswith(".tmp") and entry.is_file(follow_symlinks=False):
            try:
                # For writing, because NFS does not lock files that are only open for reading.
                descriptor = os.open(entry.path, os.O_RDWR | os.O_NONBLOCK)
            except OSError:
                continue
            try:
                if _locked(descriptor):
                    Path(entry.path).unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _locked(descriptor: int) -> bool | None:
    """Take the lock of a file; False if another writer holds it, None if there are no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        raise
    return True


def _synchronise_folder(folder: Path) -> None:
    """Make the new name as durable as the content."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise FileError(
                f"A new file is in {folder}, but could not be made durable on the disk: {error.strerror or error}. "
                "Expected a working disk; write the file again."
            ) from error
    finally:
        os.close(descriptor)
