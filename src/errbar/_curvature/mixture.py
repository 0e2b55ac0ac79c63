"""Which structure each parameter has, where there is more than one: {"fc": "kron", "blocks": "block"}.

A key is the name of a parameter or of a module, in which all parameters are meant; the longest key that fits decides,
and "*" stands for all that no other key names. All parameters with the same structure are one part: `dense` is one
matrix for all of its parameters, whatever the number of keys. As text, on the command line and in files, it is
"fc=kron,blocks=block".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from errbar._model.selection import Selection, listed, listed_modules
from errbar.errors import ArgumentError

REST = "*"


@dataclass(frozen=True)
class Mixture:
    """Keys and their structures, by name, the one for the rest at the end."""

    entries: tuple[tuple[str, str], ...]

    @staticmethod
    def of(structures: Mapping[str, str], allowed: Sequence[str]) -> Mixture:
        """From a mapping, checked as far as it can be without a network; `allowed` are the structures to mix."""
        if not structures:
            raise ArgumentError("structure is an empty mapping; expected a structure for each layer, or for '*'.")
        for key, name in structures.items():
            if not isinstance(key, str) or not key or key != key.strip() or set(key) & set("=,"):
                raise ArgumentError(
                    f"structure names {key!r}; expected the name of a module or a parameter, without '=' and ',', or "
                    "'*' for all others."
                )
            if name == "lowrank" and name not in allowed:
                raise ArgumentError(
                    f"structure gives {key!r} 'lowrank', whose directions run through all parameters: it cannot be one "
                    f"of several. Expected {_choices(allowed)}, or structure='lowrank' for all of them.",
                    arguments={"structure": "lowrank"},
                )
            if name not in allowed:
                raise ArgumentError(f"structure gives {key!r} {name!r}; expected {_choices(allowed)}.")
        ordered = sorted(structures.items(), key=lambda entry: (entry[0] == REST, entry[0]))
        return Mixture(tuple(ordered))

    @staticmethod
    def parsed(text: str, allowed: Sequence[str]) -> Mixture:
        """From a text, "fc=kron,*=block"."""
        structures: dict[str, str] = {}
        for entry in text.split(","):
            key, equals, name = (part.strip() for part in entry.rpartition("="))
            if not (key and equals and name) or key in structures:
                raise ArgumentError(
                    f"structure is {text!r}; expected name=structure for each module, with commas between them and "
                    "each name once, for example 'head=kron,*=block'."
                )
            structures[key] = name
        return Mixture.of(structures, allowed)

    @property
    def text(self) -> str:
        """The text that is read as the same mixture.

        >>> Mixture.of({"*": "block", "fc": "kron"}, ("block", "kron")).text
        'fc=kron,*=block'
        """
        return ",".join(f"{key}={name}" for key, name in self.entries)

    def assigned(self, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """The parameters of each structure, in the order of the structures' first parameters.

        Each of `names` must have a structure, and each key at least one of `names` in it.
        """
        keys = dict(self.entries)
        lengths = sorted({len(key) for key in keys}, reverse=True)
        parts: dict[str, list[str]] = {}
        used: set[str] = set()
        missing = []
        for name in names:
            fitting = [
                name[:n] for n in lengths if name[:n] in keys and name[n : n + 1] in ("", ".") and n <= len(name)
            ]
            used.update(fitting)
            key = fitting[0] if fitting else REST
            if key in keys:
                parts.setdefault(keys[key], []).append(name)
            else:
                missing.append(name)
        unused = [key for key in keys if key != REST and key not in used]
        if unused:
            raise ArgumentError(
                f"structure names {listed_modules(unused)}, which no selected parameter lies in; selected are "
                f"{listed(names)}."
            )
        if missing:
            raise ArgumentError(
                f"structure gives none for {listed(missing)}; expected one for each selected parameter. Add '*' for "
                "all that are not named."
            )
        return {name: tuple(own) for name, own in parts.items()}

    def selections(self, selection: Selection) -> dict[str, Selection]:
        """The parts of a selection, by structure."""
        return {name: selection.chosen(names) for name, names in self.assigned(selection.names).items()}

    def described(self, most: int = 4) -> str:
        """The mixture for people, with at most so many names for each structure.

        >>> Mixture.of({"*": "block", "fc": "kron"}, ("block", "kron")).described()
        'kron (fc) and block (the rest)'
        """
        keys: dict[str, list[str]] = {}
        for key, name in self.entries:
            keys.setdefault(name, []).append("the rest" if key == REST else key)
        return " and ".join(f"{name} ({listed(own, most)})" for name, own in keys.items())


def is_mixture(structure: str) -> bool:
    """Whether a text says which structure each part has, and is not the name of one."""
    return "=" in structure


def described_structure(structure: str, most: int = 4) -> str:
    """A structure for people: its name, or what each part of a mixture has; see `Mixture.described`.

    >>> described_structure("dense"), described_structure("fc=kron,*=block")
    ('dense', 'kron (fc) and block (the rest)')
    """
    if not is_mixture(structure):
        return structure
    entries = (entry.rpartition("=") for entry in structure.split(","))
    return Mixture(tuple((key, name) for key, _, name in entries)).described(most)


def _choices(allowed: Collection[str]) -> str:
    return " or ".join(repr(name) for name in allowed)
