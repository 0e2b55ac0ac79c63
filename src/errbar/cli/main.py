"""The command line: `errbar COMMAND`. A command reads its options, calls the library, and prints.

Commands about models and data are in `errbar.cli`. typer and rich are an extra. They are imported inside
`application`, so that without them `errbar` says in one sentence what to install. (No `from __future__ import
annotations` here: typer evaluates the annotations, and `typer` itself is known only inside the function.)
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch

from errbar.cli.named import place_in_user_code, told
from errbar.cli.wording import in_words_of_commands
from errbar.errors import ErrbarError, MismatchError, MissingExtraError, how_to_install

if TYPE_CHECKING:
    import typer

    from errbar._files.load import FileDescription


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake becomes one sentence on standard error and exit code 1."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # What was typed travels along: a report says which command made it.
        application()(args=typed, prog_name="errbar", obj=tuple(typed))
    except ErrbarError as error:
        _leave(in_words_of_commands(" ".join(str(error).split())), error, typed)
    except torch.OutOfMemoryError as error:
        sentence = (
            f"The device is out of memory: {str(error).splitlines()[0]} Use a smaller --batch-size, or --device cpu."
        )
        _leave(sentence, error, typed)
    except Exception as error:
        _leave(_unexpected(error), error, typed)


def _leave(sentence: str, error: Exception, typed: Sequence[str]) -> None:
    """All ranks of a job fail with the same sentence, so the first tells it, after the traceback if that is wanted."""
    if os.environ.get("RANK", "0") == "0":
        if "--traceback" in typed or os.environ.get("ERRBAR_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exception(error)
        sys.stderr.write(f"errbar: {sentence}\n")
    sys.exit(1)


def _unexpected(error: Exception) -> str:
    """An exception that nobody expected, in a sentence: of the user's own data set, or of errbar itself."""
    place = place_in_user_code(error)
    if place is not None:
        return f"Your code raised {told(error)}, in {place}. errbar --traceback … shows the way there."
    if isinstance(error, OSError):
        return f"{told(error)}. Expected a path that exists, can be read or written, and has room."
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"errbar failed with {told(error)}, in line {last.lineno} of {last.filename}. That should not happen: please "
        "report it, with what errbar --traceback … shows."
    )


def application() -> "typer.Typer":
    """The commands, ready to run."""
    try:
        import rich  # noqa: F401 - only asked whether it is there; the commands print with it
        import typer
    except ImportError as missing:
        raise MissingExtraError(
            f"the command line needs {missing.name}, which is not installed: {how_to_install('cli')}."
        ) from missing

    from errbar.cli import assessing, evaluating, exporting, fitting, predicting, serving
    from errbar.cli.models import model_of
    from errbar.cli.session import session

    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Error bars on the class probabilities of neural-network classifiers.",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            import errbar

            typer.echo(f"errbar {errbar.__version__}")
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

    @app.command()
    def demo(
        output: Annotated[
            Path, typer.Option("--output", metavar="DIR", help="Folder for the figures; made if missing.")
        ] = Path("demo-output"),
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
        progress: Annotated[bool, typer.Option(help="Show how long it still takes.")] = True,
    ) -> None:
        """Train on scikit-learn's digits, compare seven methods, fuse, assess risk, and draw the figures."""
        from errbar.demo import run

        with session("demo", as_json=as_json, progress=progress) as here:
            facts = run(output, progress=here.progress, quiet=as_json)
            if as_json:
                here.answer(facts)

    @app.command()
    def reproduce(
        experiment: Annotated[
            str, typer.Argument(metavar="NAME", help="mnist, cifar10, gtsrb, digits, resnet20, resnet32.")
        ],
        data: Annotated[
            Path | None, typer.Option("--data", metavar="DIR", help="Folder with the data sets; digits need none.")
        ] = None,
        output: Annotated[
            Path, typer.Option("--output", metavar="DIR", help="Folder for results, figures and trained networks.")
        ] = Path("reproduce-output"),
        seeds: Annotated[int | None, typer.Option(help="Number of runs; by default 5, or 3 for larger data.")] = None,
        only: Annotated[
            int | None,
            typer.Option(min=0, metavar="SEED", help="One run alone, to spread them; finished ones are put together."),
        ] = None,
        quick: Annotated[bool, typer.Option("--quick", help="A small subset: the whole pipeline in a minute.")] = False,
        device: Annotated[str, typer.Option(help="Where to compute, for example cuda.")] = "cpu",
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
        progress: Annotated[bool, typer.Option(help="Show how long it still takes.")] = True,
    ) -> None:
        """Repeat an experiment of the paper: train, compare the methods, fuse, clean, and draw the figures."""
        from errbar.experiments.command import run

        with session("reproduce", as_json=as_json, progress=progress, device=device) as here:
            facts = run(
                experiment,
                data=data,
                output=output,
                seeds=seeds,
                quick=quick,
                device=device,
                progress=here.progress,
                only=only,
                quiet=as_json,
            )
            if as_json:
                here.answer(facts)

    functions: list[Callable[..., None]] = [fitting.fit, fitting.calibrate, predicting.predict, evaluating.evaluate]
    functions += [predicting.fuse, assessing.plan, assessing.outliers, fitting.update, fitting.forget, fitting.merge]
    functions += [exporting.export, serving.serve]
    for function in functions:
        app.command()(function)

    @app.command()
    def info(
        file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that errbar has written.")],
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    ) -> None:
        """Print what a file says about itself; only its header is read."""
        from errbar._files.load import info

        with session("info", as_json=as_json) as here:
            described = info(file)
            here.answer(asdict(described), _table(described))

    @app.command()
    def verify(
        file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that errbar has written.")],
        model: Annotated[
            str | None, typer.Argument(metavar="[PACKAGE.MODULE:CALLABLE]", help="Returns the model of the fit.")
        ] = None,
        weights: Annotated[
            Path | None, typer.Option("--weights", metavar="FILE", help="Its weights: .safetensors, .pt, .pth or .th.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")] = False,
    ) -> None:
        """Read and check all of a file, and with a model that the file is about its weights."""
        from errbar._files.load import verify

        with session("verify", as_json=as_json) as here:
            try:
                checked = verify(file, None if model is None else model_of(model, weights, here.device))
            except MismatchError as error:
                hint = " Give its weights with --weights." if weights is None else ""
                raise MismatchError(f"{error}{hint}") from error
            about = "" if model is None else f", and about the weights of {model}"
            here.answer({**asdict(checked), "whole": True}, f"{_table(checked)}\n{file} is whole{about}.")

    return app


def _table(description: "FileDescription") -> str:
    """One line for each thing that a file says about itself."""
    lines = []
    for name, value in asdict(description).items():
        shown: Any = ", ".join(value) if name == "parameters" or isinstance(value, tuple) else value
        if value is not None:
            lines.append(f"{name.replace('_', ' '):<17} {shown}")
    return "\n".join(lines)
