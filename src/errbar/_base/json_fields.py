"""The description inside a file, which is not trusted: the type and range of each field are checked.

A file may come from anywhere. Anything unexpected raises a `DamagedFileError` that names the field.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from errbar.errors import DamagedFileError

# The most values to parse: an empty list takes two bytes of a file and sixty of memory.
MOST_VALUES = 500_000
# Above any count in a file, below the limit of integers of a tensor library.
_LARGEST = 2**62
# All numbers written are finite, so this range includes them.
_MOST = sys.float_info.max


class Fields:
    """A JSON object of a file; `where` names the file in errors."""

    def __init__(self, values: Any, where: str) -> None:
        self.where = where
        if not isinstance(values, dict):
            raise DamagedFileError(f"{where} holds a description that is not a JSON object.")
        self._values: dict[str, Any] = values

    @staticmethod
    def parsed(text: str | bytes, where: str) -> Fields:
        """From JSON without NaN, without infinity, with each name once, and of bounded size in memory."""
        if count_values(text) > MOST_VALUES:
            raise DamagedFileError(f"{where} holds a description of over {MOST_VALUES:,} values; expected fewer.")
        try:
            return Fields(json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant), where)
        except (ValueError, RecursionError) as error:
            raise DamagedFileError(f"{where} holds a description that is not JSON ({type(error).__name__}).") from error

    def under(self, name: str) -> Fields:
        """An object that has these fields as its only part."""
        return Fields({name: self._values}, self.where)

    def _refuse(self, name: str, expected: str) -> NoReturn:
        value = repr(self._values.get(name))
        excerpt = value if len(value) <= 60 else f"{value[:60]}…"
        raise DamagedFileError(f"{self.where} says {name} = {ascii(excerpt)[1:-1]}; expected {expected}.")

    def __contains__(self, name: str) -> bool:
        """Whether the field is there, and is not null."""
        return self._values.get(name) is not None

    def names(self) -> Iterator[str]:
        return iter(self._values)

    def whole(self, name: str, least: int = 0) -> int:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            self._refuse(name, f"a whole number of {least} or more")
        return value

    def number(self, name: str, least: float = -_MOST, most: float = _MOST, above: float = -math.inf) -> float:
        """A finite number from `least` to `most`, and above `above`; an integer stays one."""
        value = self._values.get(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not (least <= value <= most and value > above):  # type: ignore[operator]
            self._refuse(name, "a finite number in its range")
        return value  # type: ignore[return-value]

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def text(self, name: str) -> str:
        """Text without control characters and broken code points, so that it can be shown."""
        value = self._values.get(name)
        if not isinstance(value, str) or not value.isprintable():
            self._refuse(name, "printable text")
        return value

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        value = self.text(name)
        if value not in allowed:
            self._refuse(name, " or ".join(allowed))
        return value

    def digest(self, name: str) -> str:
        value = self.text(name)
        if len(value) != 64 or not set(value) <= set("0123456789abcdef"):
            self._refuse(name, "a SHA-256 in 64 hexadecimal digits")
        return value

    def part(self, name: str) -> Fields:
        value = self._values.get(name)
        if not isinstance(value, dict):
            self._refuse(name, "an object")
        return Fields(value, self.where)

    def parts(self, name: str) -> list[Fields]:
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self._refuse(name, "a list of objects")
        return [Fields(item, self.where) for item in value]

    def wholes(self, name: str, length: int | None = None) -> tuple[int, ...]:
        value = self._values.get(name)
        is_list = isinstance(value, list) and (length is None or len(value) == length)
        if not is_list or not all(type(item) is int and 0 <= item <= _LARGEST for item in value):  # type: ignore[union-attr]
            self._refuse(name, "a list of whole numbers of zero or more")
        return tuple(value)  # type: ignore[arg-type]

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._values.get(name)
        if not isinstance(value, list) or not all(isinstance(item, str) and item.isprintable() for item in value):
            self._refuse(name, "a list of printable texts")
        return tuple(value)


def count_values(text: str | bytes) -> int:
    """An upper bound of the number of values in a JSON text: each of them follows one of these characters."""
    if isinstance(text, bytes):
        return sum(text.count(character) for character in (b",", b"[", b"{", b":"))
    return sum(text.count(character) for character in (",", "[", "{", ":"))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name occurs twice")
    return fields


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
