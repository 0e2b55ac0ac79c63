"""Damaged and hostile variants of a file, from a seed.

`damaged` changes bytes as a bad disk or a cut-off transfer does; `hostile` changes what the file says and gives it the
digest that belongs to that, as somebody would who wants errbar to stumble.
"""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from random import Random
from typing import Any

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2,
    7,
    2**31,
    2**62,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e-320,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "x" * 1000,
    "\x00\x1b[2J",
    "\ud800",
    "0" * 64,
    "f" * 64,
    "dense",
    "per_class",
    "block",
    "kron",
    "diag",
    "lowrank",
    "eta",
    "ggn",
    "float32",
    "float64",
    "F32",
    "F64",
    "I64",
    "BOOL",
    "posterior",
    "information",
    "checkpoint",
    [],
    [0],
    [1, 1],
    [2**62, 4],
    [0, 2**62, 2**62],
    [[]],
    {},
    {"name": "0.weight", "shape": [3, 2]},
]

NUMBERS = [0.0, -0.0, -1.0, 1.0, 1e-320, 1e-200, 1e150, 1e300, -1e300, float("nan"), float("inf"), -float("inf")]


def damaged(data: bytes, random: Random) -> bytes:
    """Flipped bits, truncations, zeroed and repeated stretches, hostile header lengths; never `data` itself."""
    while True:
        changed = bytearray(data)
        kind = random.randrange(6)
        at = random.randrange(len(data))
        if kind == 0:
            for _ in range(random.choice([1, 1, 1, 8])):
                changed[random.randrange(len(data))] ^= 1 << random.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            changed += bytes(random.randrange(256) for _ in range(random.randrange(1, 64)))
        elif kind == 3:
            stretch = random.randrange(1, 512)
            changed[at : at + stretch] = bytes(len(changed[at : at + stretch]))
        elif kind == 4:
            changed[:8] = struct.pack("<Q", random.choice([0, 1, 2**16, 2**31, 2**63, 2**64 - 1, len(data), at]))
        else:
            other = random.randrange(len(data))
            changed[at : at + 64] = data[other : other + 64]
        if bytes(changed) != data:
            return bytes(changed)


def hostile(data: bytes, random: Random) -> bytes:
    """Something else said in the header, in the description or in the arrays, with the digest that belongs to it."""
    length = struct.unpack("<Q", data[:8])[0]
    header, arrays = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    description = json.loads(header["__metadata__"]["description"])
    kind = random.randrange(8)
    if kind <= 3:
        for _ in range(random.choice([1, 1, 2])):
            _change(description, random)
    elif kind == 4:
        _change(header, random)
    elif kind == 5:
        name = random.choice([name for name in header if name != "__metadata__"])
        _change(header[name], random)
    elif kind == 6:
        for _ in range(random.choice([1, 8, 512])):
            at = 8 * random.randrange(len(arrays) // 8)
            arrays[at : at + 8] = struct.pack("<d", random.choice(NUMBERS))
    else:
        names = [name for name in header if name != "__metadata__"]
        first, second = random.choice(names), random.choice(names)
        header[first], header[second] = header[second], header[first]
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and kind != 4:
        metadata["description"] = json.dumps(description)
        if random.random() < 0.02:
            metadata["description"] = "[" * 100_000
    text = json.dumps(header)
    if random.random() < 0.05 and '"factored"' in text:
        text = text.replace(r"{\"", r"{\"factored\": true, \"", 1)
    return sealed(text.encode(), bytes(arrays))


def sealed(header: bytes, arrays: bytes) -> bytes:
    """A file whose digest is right, as far as there is a place for one."""
    try:
        old = json.loads(header)["__metadata__"]["content"].encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        old = b""
    if len(old) == 64:
        header = header.replace(old, b"0" * 64, 1)
    whole = struct.pack("<Q", len(header)) + header + arrays
    if len(old) == 64:
        whole = whole.replace(b"0" * 64, hashlib.sha256(whole).hexdigest().encode(), 1)
    return whole


def _change(value: Any, random: Random) -> None:
    """Replace, remove or add something somewhere inside of a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = random.choice(keys)
        inside = value[key]
        if isinstance(inside, (dict, list)) and inside and random.random() < 0.8:
            value = inside
            continue
        action = random.random()
        if action < 0.1:
            del value[key]
        elif action < 0.2 and isinstance(value, list):
            value.append(copy.deepcopy(random.choice([inside, *HOSTILE])))
        elif action < 0.3 and isinstance(inside, (int, float)) and not isinstance(inside, bool):
            value[key] = inside + random.choice([-1, 1, 0.5, 1e-9])
        else:
            value[key] = copy.deepcopy(random.choice(HOSTILE))
        return
