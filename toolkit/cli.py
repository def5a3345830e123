"""The ``toolkit`` command: registers commands, turns errors into one paragraph and a code."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from toolkit import __version__
from toolkit.commands import (
    bench,
    build,
    customize,
    doctor,
    enroot,
    image,
    import_image,
    login,
    push,
    run,
    runs,
    smoke,
)
from toolkit.commands.display import silence
from toolkit.commands.options import add_job_command
from toolkit.entrypoint import codes
from toolkit.errors import ToolkitError

app = typer.Typer(
    name="toolkit",
    help="PyTorch + PyG training from a workstation to a Slurm cluster with pyxis and enroot.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(value: bool) -> None:  # noqa: FBT001 - a Typer callback's signature
    if value:
        typer.echo(f"toolkit {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    *,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (or TOOLKIT_DEBUG=1).")
    ] = False,
    version: Annotated[  # noqa: ARG001 - acts through its callback
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if debug:
        os.environ["TOOLKIT_DEBUG"] = "1"


add_job_command(app, "run", run.run)
add_job_command(app, "submit", run.submit, batch=True)
add_job_command(app, "shell", run.shell)
for command in (
    runs.status,
    runs.logs,
    runs.cancel,
    build.build,
    push.push,
    smoke.smoke,
    image.export,
    login.login,
    doctor.doctor,
    customize.customize,
):
    app.command()(command)
app.command("import")(import_image.import_image)
app.add_typer(enroot.app)
app.add_typer(bench.app, name="bench")
images = typer.Typer(help="Image references.", no_args_is_help=True, rich_markup_mode=None)
images.command()(image.ref)
app.add_typer(images, name="image")


def main() -> None:
    """Run the command line; an error is one paragraph on stderr and its own exit code."""
    try:
        app()
    except ToolkitError as error:
        _fail(str(error), error.exit_code, error)
    except KeyboardInterrupt:
        sys.exit(codes.CANCELLED)
    except BrokenPipeError:  # `| head`: as a program ends that knows nothing of it
        silence()
        sys.exit(codes.SIGNAL + signal.SIGPIPE)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug is one paragraph too
        message = (
            f"a bug in toolkit: {type(error).__name__}: {error}. `toolkit --debug …` shows where."
        )
        _fail(message, ToolkitError.exit_code, error)


def _fail(message: str, code: int, error: Exception) -> None:
    if os.environ.get("TOOLKIT_DEBUG"):
        raise error
    print(f"toolkit: {message}", file=sys.stderr)
    sys.exit(code)
