"""``python -m toolkit.entrypoint`` or ``entrypoint.pyz``: show the World, or start a command."""

from __future__ import annotations

# signal itself wraps this in enums, which cost more than all the rest.
import _signal  # type: ignore[import-not-found]  # typeshed has no stub of it
import os
import sys

from toolkit.entrypoint import resolve
from toolkit.entrypoint.world import EntrypointError, parse_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

USAGE = """\
usage: python -m toolkit.entrypoint --show | --hostlist EXPR | --finish RUN CODE [AGAIN]
       python -m toolkit.entrypoint [--agent RANKS] -- COMMAND...

  --show             print the World (ranks, MASTER_ADDR, MASTER_PORT) as JSON; start nothing
  --hostlist EXPR    print the names of a Slurm host list, one a line
  --finish RUN CODE  write result.json of a run whose srun ended with CODE, and end with the
                     first failing rank's own code; where that is 75, run again, the result is
                     called AGAIN
  -- COMMAND...      check that the ranks can meet, export the World, become COMMAND
  --agent RANKS      COMMAND is no rank but starts so many on this node, as torchrun does

Ends with 71 where ranks or variables are wrong, 76 where the address or the port cannot be used.
"""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Do what the arguments say, and end the process."""
    restore_signals()
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    except OSError as error:  # stdout is closed or full
        code = 1
        say(f"cannot write the answer: {error.strerror}.")
    except EntrypointError as error:
        code = error.exit_code
        say(("" if error.rank is None else f"rank {error.rank}: ") + str(error))
    # Nothing is buffered, and a look-up that still hangs in its thread is left behind.
    os._exit(code)


def restore_signals() -> None:
    """Undo what Python does to signals at its start: exec would pass the ignored ones on."""
    for name in ("SIGPIPE", "SIGXFSZ", "SIGXFZ"):
        number = getattr(_signal, name, None)
        if number is not None:
            _signal.signal(number, _signal.SIG_DFL)
    # Ctrl-C during a check ends the process by the signal, without a traceback.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)


def run(arguments: list[str]) -> int:
    """One of the four uses; returns an exit code unless the process became the command."""
    if arguments == ["--show"]:
        import json

        write(1, json.dumps(resolve().as_dict(), indent=2))
        return 0
    if len(arguments) == 2 and arguments[0] == "--hostlist":
        from toolkit.entrypoint.hostlist import expand

        write(1, "\n".join(expand(arguments[1])))
        return 0
    if len(arguments) in (3, 4) and arguments[0] == "--finish":
        from toolkit.entrypoint.finish import finish

        return finish(arguments[1], parse_number(arguments[2], "CODE"), "".join(arguments[3:]))
    agent_of = 0
    if len(arguments) > 1 and arguments[0] == "--agent":
        agent_of = parse_number(arguments[1], "RANKS")
        arguments = arguments[2:]
    if arguments[:1] == ["--"] and len(arguments) > 1:
        from toolkit.entrypoint.start import start

        return start(resolve(), arguments[1:], say, agent_of=agent_of)
    helped = arguments in (["-h"], ["--help"])
    write(1 if helped else 2, USAGE.rstrip())
    return 0 if helped else 2


def say(message: str) -> None:
    """One message on stderr, in one write, so that those of other ranks do not cut it."""
    try:
        write(2, f"toolkit: {message}")
    except OSError:
        return  # a closed stderr is no reason not to run


def write(descriptor: int, text: str) -> None:
    """Write all of ``text`` and a newline, whatever bytes it carries from the environment."""
    data = os.fsencode(text + "\n")
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main()
