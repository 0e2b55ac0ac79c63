"""The command line: `errbar COMMAND`. A command reads its options, calls the library, and prints.

typer and rich are an extra. They are imported inside `application`, so that without them `errbar` says in one
sentence what to install. (No `from __future__ import annotations` here: typer evaluates the annotations, and
`typer` itself is known only inside the function.)
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from errbar.errors import ArgumentError, ErrbarError, MissingExtraError

if TYPE_CHECKING:
    import typer
    from torch import nn

    from errbar.storage import FileDescription


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake becomes one sentence on standard error and exit code 1."""
    try:
        application()(args=None if arguments is None else list(arguments), prog_name="errbar")
    except ErrbarError as error:
        sys.stderr.write(f"errbar: {error}\n")
        sys.exit(1)


def application() -> "typer.Typer":
    """The commands, ready to run."""
    try:
        import rich  # noqa: F401 - only asked whether it is there; the commands print with it
        import typer
    except ImportError as missing:
        raise MissingExtraError(
            f"the command line needs {missing.name}, which is not installed: pip install 'errbar[cli]'."
        ) from missing

    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
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
    ) -> None:
        """Options that need no command."""

    @app.command()
    def demo(
        output: Annotated[
            Path, typer.Option("--output", metavar="DIR", help="Folder for the figures; made if missing.")
        ] = Path("demo-output"),
        progress: Annotated[bool, typer.Option(help="Show how long it still takes.")] = True,
    ) -> None:
        """Train on scikit-learn's digits, compare seven methods, fuse, assess risk, and draw the figures."""
        from errbar.demo import run

        run(output, progress=progress)

    @app.command()
    def reproduce(
        experiment: Annotated[str, typer.Argument(help="mnist, cifar10, gtsrb, digits, resnet20 or resnet32.")],
        data: Annotated[
            Path | None, typer.Option("--data", metavar="DIR", help="Folder with the data sets; digits need none.")
        ] = None,
        output: Annotated[
            Path, typer.Option("--output", metavar="DIR", help="Folder for results, figures and trained networks.")
        ] = Path("reproduce-output"),
        seeds: Annotated[int | None, typer.Option(help="Number of runs; by default 5, or 3 for larger data.")] = None,
        only: Annotated[
            int | None,
            typer.Option(metavar="SEED", help="One run alone, to spread them; finished ones are put together."),
        ] = None,
        quick: Annotated[bool, typer.Option("--quick", help="A small subset: the whole pipeline in a minute.")] = False,
        device: Annotated[str, typer.Option(help="Where to compute, for example cuda.")] = "cpu",
        progress: Annotated[bool, typer.Option(help="Show how long it still takes.")] = True,
    ) -> None:
        """Repeat an experiment of the paper: train, compare the methods, fuse, clean, and draw the figures."""
        from errbar.experiments.command import run

        run(experiment, data=data, output=output, seeds=seeds, quick=quick, device=device, progress=progress, only=only)

    @app.command()
    def info(file: Annotated[Path, typer.Argument(help="A file that errbar has written.")]) -> None:
        """Print what a file says about itself; only its header is read."""
        from errbar.storage import info

        typer.echo(_table(info(file)))

    @app.command()
    def verify(
        file: Annotated[Path, typer.Argument(help="A file that errbar has written.")],
        model: Annotated[
            str | None, typer.Argument(metavar="[PACKAGE.MODULE:CALLABLE]", help="Returns the model of the fit.")
        ] = None,
    ) -> None:
        """Read and check all of a file, and with a model that the file is about its weights."""
        from errbar.storage import verify

        checked = verify(file, None if model is None else _model(model))
        about = "" if model is None else f", and about the weights of {model}"
        typer.echo(f"{_table(checked)}\n{file} is whole{about}.")

    return app


def _table(description: "FileDescription") -> str:
    """One line for each thing that a file says about itself."""
    lines = []
    for field in fields(description):
        value = getattr(description, field.name)
        if field.name == "parameters" or isinstance(value, tuple):
            value = ", ".join(value)
        if value is not None:
            lines.append(f"{field.name.replace('_', ' '):<17} {value}")
    return "\n".join(lines)


def _model(where: str) -> "nn.Module":
    """The model that `package.module:callable` returns, or is; modules are looked for in the current folder too."""
    name, _, attribute = where.partition(":")
    if not name or not attribute:
        raise ArgumentError(f"The model is {where!r}; expected package.module:callable, for example project.net:load.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ArgumentError(f"The model {where!r} cannot be imported: {error}.") from error
    return found if hasattr(found, "named_parameters") and not isinstance(found, type) else found()  # type: ignore[no-any-return]
