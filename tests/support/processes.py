"""Python processes that tests start: scripts with the package on their path, jobs of torchrun, and `errbar serve`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import errbar
from places import SUPPORT

SOURCE = Path(errbar.__file__).parent.parent


def environment(**more: str) -> dict[str, str]:
    """That of this process, with the package under test and the modules of this folder on the path of Python."""
    path = [str(SOURCE), str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)} | more


def torchrun(world: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script, or `-m` and a module, with its arguments, as a job of `world` processes on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    # Port 0: torchrun takes one that is free, and nobody can take it in between.
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300, check=False)


def script_output(name: str, *arguments: object) -> dict[str, Any]:
    """What a script of this folder prints, as JSON, in a process of its own."""
    command = [sys.executable, str(SUPPORT / name), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, env=environment())
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout)  # type: ignore[no-any-return]


@contextmanager
def service_process(
    folder: Path, *arguments: str, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`errbar serve` in a process of its own, and what it says when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "errbar", "serve", *arguments, "--port", "0", "--json"],
        cwd=folder,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=20)
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()
