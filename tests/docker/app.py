"""The image commands behind one small command line, with the errors of ``toolkit.cli.main``."""

from __future__ import annotations

import sys

import typer

from toolkit.commands.build import build
from toolkit.commands.push import push
from toolkit.commands.smoke import smoke
from toolkit.errors import ToolkitError

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
for command in (build, push, smoke):
    app.command()(command)

if __name__ == "__main__":
    try:
        app()
    except ToolkitError as error:
        print(f"toolkit: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
