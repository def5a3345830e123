"""The options of a job on the command line, from the table in :mod:`toolkit.options`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from toolkit.commands.display import message
from toolkit.errors import UsageError
from toolkit.options import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from toolkit.options import Option

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[WORKLOAD [ARGS]... | -- COMMAND...]", show_default=False),
]
Cluster = Annotated[str | None, typer.Option(help="Profile of toolkit.toml to use.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would be executed, as a script; start nothing."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, all else on stderr.")
]

OnNode = Annotated[
    str, typer.Option("--on", help="local: this machine; slurm: a compute node of the cluster.")
]

EXPLICIT_COMMAND = "toolkit.explicit_command"

_TYPES: dict[type, Any] = {
    int: int | None,
    str: str | None,
    bool: bool | None,
    list: list[str] | None,
}


def wants_node(on: str) -> bool:
    """Whether ``--on`` of a command that needs no training job asks for a compute node.

    Raises:
        UsageError: if it says something else than local or slurm.
    """
    if on == "here":  # the word of doctor's own once; for one release
        message("--on here: is called --on local by now")
    elif on not in {"local", "slurm"}:
        raise UsageError(f"--on {on}: this command runs on local or slurm.")
    return on == "slurm"


def typed(option: Option) -> Any:
    """A parameter's annotation for an option of the table."""
    return Annotated[_TYPES[option.kind], typer.Option(*option.flags, help=option.help)]


Runs = typed(table()["runs"])


def add_job_command(
    app: typer.Typer,
    name: str,
    function: Callable[..., None],
    *,
    batch: bool = False,
    **instead: Any,
) -> None:
    """Register a command that starts a job; its options stand before the workload or command.

    It gets them as the dict ``options``. ``batch`` adds what only a batch job has; ``instead`` has
    annotations that replace the table's.
    """
    annotations = {
        key: instead.get(key, typed(option))
        for key, option in table().items()
        if option.flags and (batch or not option.batch)
    }

    def command(**given: Any) -> None:
        options = {key: given.pop(key) for key in annotations}
        function(options=options, **given)

    own = inspect.signature(function, eval_str=True).parameters
    parameters = [parameter for key, parameter in own.items() if key != "options"]
    parameters += [
        inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for key, annotation in annotations.items()
    ]
    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, cls=JobCommand, context_settings={"allow_interspersed_args": False})(command)


class JobCommand(TyperCommand):
    """A command that ends with ``WORKLOAD [ARGS]`` or ``-- COMMAND``.

    The parser drops the ``--``, so whether it was there is noted here.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, and note whether the words that are left stood behind ``--``."""
        given = list(args)
        left = super().parse_args(ctx, args)
        before = len(given) - len(ctx.params.get("words") or ()) - 1
        ctx.meta[EXPLICIT_COMMAND] = before >= 0 and given[before] == "--"
        return left
