"""Which rank this process is, decided from its variables alone.

Standard library only, Python 3.8 and up, and light: this runs before every rank, in images that
know nothing of this project. ``resolve()`` answers with a :class:`World` or raises
:class:`EntrypointError`; it looks nothing up, opens no socket and waits for nothing.
"""

from __future__ import annotations

from toolkit.entrypoint.world import EntrypointError, Variables, World

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EntrypointError", "World", "resolve"]


def resolve(environ: Mapping[str, str] | None = None) -> World:
    """Decide the World of this process.

    Args:
        environ: the variables to read; the process's own when None.

    Returns:
        The World. Resolving again what ``World.export()`` made gives the same one.

    Raises:
        EntrypointError: the variables are wrong, partial or contradict each other (exit code 71),
            or they call for a warning and ``TOOLKIT_STRICT=1`` makes warnings errors.
    """
    from toolkit.entrypoint.launchers import find_ranks, forced, probable_rank
    from toolkit.entrypoint.rendezvous import choose_address, choose_port, loopback_interfaces

    variables = Variables(environ)
    try:
        ranks = find_ranks(variables)
        address, address_source = choose_address(variables, ranks)
        port, port_source = choose_port(variables, ranks)
        loopback_interfaces(variables, ranks)
    except EntrypointError as error:
        if error.rank is None:
            error.rank = probable_rank(variables)
        raise
    if ranks.warnings and variables.flag("TOOLKIT_STRICT"):
        raise EntrypointError(
            f"{'; '.join(ranks.warnings)} (an error because TOOLKIT_STRICT is set).",
            rank=ranks.rank,
        )
    chosen, source = forced(variables)
    if chosen and source != "TOOLKIT_RANKS_FROM":  # no error, however strict: it still works
        ranks.warnings.append(
            f"{source}={chosen} is called TOOLKIT_RANKS_FROM={chosen} by now, and means something "
            "else from the next release on"
        )
    return World(ranks, address, address_source, port, port_source)
