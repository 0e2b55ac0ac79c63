"""Sentences of the library in the words of the command line.

The library names its arguments, `last_layers=1`; whoever types a command has `--last-layers 1`.
"""

from __future__ import annotations

import re

# Arguments of the library that are options of commands of the same name.
_OPTIONS = "last_layers|parameters|structure|precision|fisher|rank|samples|seed|prior|checkpoint|every|draws"
_ARGUMENT = re.compile(rf"\b({_OPTIONS})=(?:'([^']*)'|\"([^\"]*)\"|(\[[^\]]*\]|[\w.]*\w))?")
_PHRASES = {
    "or pass unpack= if the batch holds something else": "or change them with --transform",
    "Pass unpack= if the labels are somewhere else in the batch.": "In a file they are y, or a column called label.",
    "Pass unpack=, a function from a batch to (args, kwargs, labels).": "Let a callable make such batches.",
    "Pass leave_out=False": "Use --held-out",
    "expected risk=(0.05,) or the like": "expected --risk 0.05 or the like",
    "posterior.to('cpu').export(...)": "--device cpu",
    ", or serve posterior.predict": "",
}


def in_words_of_commands(sentence: str) -> str:
    """What to type, instead of what to write in Python.

    >>> in_words_of_commands("Use precision='float64', or last_layers=1.")
    'Use --precision float64, or --last-layers 1.'
    """
    for written, typed in _PHRASES.items():
        sentence = sentence.replace(written, typed)

    def option(found: re.Match[str]) -> str:
        value = found[2] or found[3] or found[4] or ""
        return f"--{found[1].replace('_', '-')} {value}".rstrip()

    return _ARGUMENT.sub(option, sentence)
