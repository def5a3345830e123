"""The options that describe a job: one table, for every command that starts one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from collections.abc import Callable

Text = str | None
Number = int | None
Flag = bool | None
Texts = list[str] | None

Runs = Annotated[
    str | None,
    typer.Option(help="Folder for run directories [default: TOOLKIT_RUNS, else runs]."),
]

#: By the name that toolkit/config.py and toolkit/job.py know; Slurm's and pyxis's own words.
JOB_OPTIONS: dict[str, Any] = {
    "nodes": Annotated[Number, typer.Option("-N", "--nodes", help="Number of nodes [default: 1].")],
    "ntasks": Annotated[
        Number, typer.Option("-n", "--ntasks", help="Ranks in all, spread evenly over the nodes.")
    ],
    "ntasks_per_node": Annotated[
        Number, typer.Option(help="Ranks on each node [default: --gpus-per-node, else 1].")
    ],
    "gpus_per_node": Annotated[Number, typer.Option(help="GPUs on each node.")],
    "gpus_per_task": Annotated[
        Number, typer.Option(help="GPUs of each rank; asked for as --gpus-per-node.")
    ],
    "cpus_per_task": Annotated[
        Number, typer.Option("-c", "--cpus-per-task", help="CPUs of each rank.")
    ],
    "mem": Annotated[Text, typer.Option(help="Memory on each node, such as 64G.")],
    "partition": Annotated[Text, typer.Option("-p", "--partition", help="Partition.")],
    "account": Annotated[Text, typer.Option("-A", "--account", help="Account to charge.")],
    "qos": Annotated[Text, typer.Option("-q", "--qos", help="Quality of service.")],
    "time": Annotated[
        Text, typer.Option("-t", "--time", help="Time limit: minutes, H:M:S or D-H:M:S.")
    ],
    "constraint": Annotated[
        Text, typer.Option("-C", "--constraint", help="Features that the nodes must have.")
    ],
    "job_name": Annotated[
        Text, typer.Option("-J", "--job-name", help="Name of the job [default: the workload's].")
    ],
    "launcher": Annotated[
        Text, typer.Option(help="srun: one task a rank; torchrun: one task a node [default: srun].")
    ],
    "rendezvous": Annotated[
        Text, typer.Option(help="Ranks meet at a port, or through a file [default: port].")
    ],
    "container_image": Annotated[
        Text, typer.Option("--container-image", "--image", help="Image reference or .sqsh file.")
    ],
    "container_mounts": Annotated[
        Texts, typer.Option("--container-mounts", "--mount", help="SRC:DST[:FLAGS]; repeatable.")
    ],
    "container_workdir": Annotated[
        Text, typer.Option(help="Where the command starts in the container.")
    ],
    "container_name": Annotated[
        Text, typer.Option(help="Keep the container under this name (it outlives the job).")
    ],
    "container_mount_home": Annotated[
        Flag,
        typer.Option(
            "--container-mount-home/--no-container-mount-home",
            help="Mount the home directory [default: no].",
        ),
    ],
    "container_writable": Annotated[
        Flag, typer.Option(help="Let the job write into the container's root [default: no].")
    ],
    "import_image": Annotated[
        Flag,
        typer.Option(
            "--import/--no-import",
            "--import-image/--no-import-image",
            help="Import the image first, as toolkit import does [no].",
        ),
    ],
    "images": Annotated[
        Text,
        typer.Option(help="Folder of imported images [default: TOOLKIT_IMAGES, else images]."),
    ],
    "env": Annotated[
        Texts, typer.Option(help="NAME=VALUE; or NAME, which never prints the value; repeatable.")
    ],
    "srun_arg": Annotated[Texts, typer.Option(help="One more argument for srun; repeatable.")],
    "on": Annotated[Text, typer.Option(help="auto, local, slurm or docker [default: auto].")],
    "runs": Runs,
}

#: What a batch job has besides.
BATCH_OPTIONS: dict[str, Any] = {
    "array": Annotated[
        Text, typer.Option(help="Task ids of a job array, such as 0-9%4; a run directory each.")
    ],
    "dependency": Annotated[Text, typer.Option(help="Wait for jobs, such as afterok:1234.")],
    "hold": Annotated[Flag, typer.Option(help="Submit the job held (scontrol release starts it).")],
    "signal": Annotated[
        Text,
        typer.Option(
            help="SIGNAL@SECONDS: sent to every rank so long before the time limit"
            " [default: TERM@120 with --time of 10 minutes or more]."
        ),
    ],
    "requeue": Annotated[
        Flag,
        typer.Option(
            help="Run again when preempted, when a node is lost, and when the job ends with 75"
            " [default: yes]."
        ),
    ],
    "sbatch_arg": Annotated[Texts, typer.Option(help="One more argument for sbatch; repeatable.")],
}

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[WORKLOAD [ARGS]... | -- COMMAND...]", show_default=False),
]
Cluster = Annotated[str | None, typer.Option(help="Profile of toolkit.toml to use.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print what would be executed, as a script; start nothing."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, all else on stderr.")
]

EXPLICIT_COMMAND = "toolkit.explicit_command"


def with_job_options(
    function: Callable[..., None], table: dict[str, Any] = JOB_OPTIONS
) -> Callable[..., None]:
    """Give a command every option of ``table``; it gets them as the dict ``options``."""

    def command(**given: Any) -> None:
        options = {name: given.pop(name) for name in table}
        function(options=options, **given)

    own = inspect.signature(function, eval_str=True).parameters
    parameters = [parameter for name, parameter in own.items() if name != "options"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in table.items()
    ]
    command.__doc__ = function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


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


def add_job_command(
    app: typer.Typer, name: str, function: Callable[..., None], *, batch: bool = False
) -> None:
    """Register a command that starts a job; its options stand before the workload or command.

    ``batch`` adds what only a batch job has.
    """
    settings = {"allow_interspersed_args": False}
    table = JOB_OPTIONS | BATCH_OPTIONS if batch else JOB_OPTIONS
    command = with_job_options(function, table)
    app.command(name, cls=JobCommand, context_settings=settings)(command)
