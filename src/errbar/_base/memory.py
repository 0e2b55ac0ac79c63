"""How much memory is available, and a clear refusal before an allocation that cannot succeed."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from errbar.errors import SizeError

# The rest is for everything else that the process does while the large arrays are alive.
_SAFETY = 0.9


def available_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached)
    limits = [_system_bytes(), *_container_bytes()]
    return min(limits)


def usable_bytes(device: torch.device) -> int:
    """Bytes that one fit may take: most of what is available."""
    return int(_SAFETY * available_bytes(device))


def _system_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _container_bytes() -> list[int]:
    """What a control group (version 2) still allows; empty if there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        limit, used = (root / "memory.max").read_text().strip(), (root / "memory.current").read_text()
        return [] if limit == "max" else [max(0, int(limit) - int(used))]
    except (OSError, ValueError):
        return []


def readable(size: float) -> str:
    """Bytes in words.

    >>> readable(158_420_000)
    '151.1 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def require_memory(needed: int, device: torch.device, *, what: str, instead: str) -> None:
    """Raise `SizeError` if `needed` bytes are not available; nothing is allocated either way."""
    available = available_bytes(device)
    if needed > usable_bytes(device):
        raise SizeError(
            f"{what} needs {readable(needed)} on {device}, and {readable(available)} are available. {instead}"
        )
