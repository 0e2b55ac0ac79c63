"""One thread for small work, seen by the calling thread alone.

OpenMP's threads wait for each other by spinning. Where other programs want the cores too, many small parallel steps
wait for a thread that is not running: a search of 15 s took 69. `torch.set_num_threads` is no way out: it also sets
what threads begin with that are started meanwhile, those of the user too. The numbers of threads that OpenMP and MKL
keep for each thread on its own are set here instead, and set back whatever happens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# Numbers that a search works on, above which several threads are worth their waiting: some tenths of a second a trial.
_SMALL = 2**24


@contextmanager
def one_thread(numbers: int, device: torch.device) -> Iterator[None]:
    """Compute on one thread what touches `numbers` numbers at a time, if that is little and on a CPU.

    Where torch was built without OpenMP, nothing changes.
    """
    libraries = _libraries() if numbers <= _SMALL and device.type == "cpu" else None
    before = torch.get_num_threads()
    if libraries is None or before == 1:
        yield
        return
    openmp, mkl = libraries
    openmp(1)
    mkl_before = 0 if mkl is None else mkl(1)
    try:
        yield
    finally:
        openmp(before)
        if mkl is not None:
            mkl(mkl_before)


@cache
def _libraries() -> tuple[Any, Any] | None:
    """`omp_set_num_threads` and `mkl_set_num_threads_local` (None without MKL), as torch itself calls them."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        openmp = library.omp_set_num_threads
    except (OSError, AttributeError, TypeError):
        return None
    openmp.argtypes, openmp.restype = [ctypes.c_int], None
    # In capitals it takes the number; in small letters, for Fortran, a pointer to it.
    mkl = getattr(library, "MKL_Set_Num_Threads_Local", None)
    if mkl is not None:
        mkl.argtypes, mkl.restype = [ctypes.c_int], ctypes.c_int
    return openmp, mkl
