"""The command line: `errbar COMMAND`. A command reads its options, calls the library, and prints.

typer and rich are an extra, and the modules of the commands import typer. So they are imported inside `application`:
without them `errbar` says in one sentence what to install. (No `from __future__ import annotations` here: typer
evaluates the annotations, and `typer` itself is known only inside the function.)
"""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from errbar.cli.user_code import description, place_in_user_code
from errbar.errors import ErrbarError, MissingExtraError, how_to_install
from errbar.version import __version__

if TYPE_CHECKING:
    import typer

# In the order in which --help lists them: each is the function of its name in the module of its name.
COMMANDS = (
    "demo",
    "reproduce",
    "autofit",
    "fit",
    "calibrate",
    "calibrate_fusion",
    "predict",
    "evaluate",
    "fuse",
    "plan",
    "outliers",
    "acquire",
    "update",
    "forget",
    "merge",
    "export",
    "serve",
    "info",
    "verify",
)

# What the library says to whoever writes Python, and what to say instead to whoever types a command.
ADVICE = {
    "or pass unpack= if the batch holds something else": "or change them with --transform",
    "Pass unpack= if the labels are somewhere else in the batch.": "In a file they are y, or a column called label.",
    "Pass unpack=, a function from a batch to (args, kwargs, labels).": "Let a callable make such batches.",
    "pass outputs='labels' to errbar.fit": "use errbar fit --outputs labels",
    "pass outputs='positions' to errbar.fit": "use errbar fit --outputs positions",
    "pass ignore_index= to the fit": "give --ignore-index to errbar fit",
    "Pass leave_out=False": "Use --held-out",
    "k is ": "--count is ",
    "use by='mutual_information'": "use --by mutual-information",
    "expected, for example, risk=(0.05,)": "expected, for example, --risk 0.05",
    "posterior.to('cpu').export(...)": "--device cpu",
    ", or serve posterior.predict": "",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake becomes one sentence on standard error and exit code 1."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # What was typed travels along: a report says which command made it.
        application()(args=words, prog_name="errbar", obj=tuple(words))
    except Exception as error:
        _leave(_sentence(error), error, words)


def _leave(sentence: str, error: Exception, words: Sequence[str]) -> None:
    """All ranks of a job fail with the same sentence, so the first tells it, after the traceback if that is wanted."""
    if os.environ.get("RANK", "0") == "0":
        if "--traceback" in words or os.environ.get("ERRBAR_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exception(error)
        sys.stderr.write(f"errbar: {sentence}\n")
    sys.exit(1)


def _sentence(error: Exception) -> str:
    """What went wrong: a mistake that errbar names, too little memory, or an exception that nobody expected."""
    if isinstance(error, ErrbarError):
        return sentence_of(error)
    # Without torch, nothing can have run out of the memory of a device.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return f"The device is out of memory: {str(error).splitlines()[0]} Use a smaller --batch-size, or --device cpu."
    place = place_in_user_code(error)
    if place is not None:
        return f"Your code raised {description(error)}, in {place}. errbar --traceback … shows the way there."
    if isinstance(error, OSError):
        return f"{description(error)}. Expected a path that exists, can be read or written, and has room."
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"errbar failed with {description(error)}, in line {last.lineno} of {last.filename}. That should not happen: "
        "please report it, with what errbar --traceback … shows."
    )


def sentence_of(error: ErrbarError) -> str:
    """The sentence of an error, with what to type instead of what to write in Python.

    >>> sentence_of(ErrbarError("Use precision='float64'.", arguments={"precision": "float64"}))
    'Use --precision float64.'
    """
    sentence = " ".join(str(error).split())
    for written, typed in ADVICE.items():
        sentence = sentence.replace(written, typed)
    for name, values in error.arguments.items():
        for value in values if isinstance(values, tuple) else (values,):
            sentence = sentence.replace(f"{name}={value!r}", f"--{name.replace('_', '-')} {value}")
    return sentence


def application() -> "typer.Typer":
    """The commands, ready to run."""
    try:
        import rich  # noqa: F401 - only asked whether it is there; the commands print with it
        import typer
    except ImportError as missing:
        raise MissingExtraError(
            f"the command line needs {missing.name}, which is not installed: {how_to_install('cli')}."
        ) from missing

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Error bars on the class probabilities of neural-network classifiers.",
    )

    def show_version(asked: bool) -> None:
        if asked:
            typer.echo(f"errbar {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
        ] = False,
        with_traceback: Annotated[
            bool,
            typer.Option(
                "--traceback", help="After a mistake, show the way there too; ERRBAR_TRACEBACK=1 does the same."
            ),
        ] = False,
    ) -> None:
        """Options that need no command."""

    for name in COMMANDS:
        app.command()(getattr(import_module(f"errbar.cli.{name}"), name))
    return app
