"""Can the ranks meet at MASTER_ADDR and MASTER_PORT? Asked before the command, with a limit."""

from __future__ import annotations

# socket itself imports selectors and enums, which cost more than all the rest.
import _socket
import _thread
import errno
import os
import time

from toolkit.entrypoint import codes
from toolkit.entrypoint.rendezvous import LOOPBACK, LOWEST_PORT, PRIME
from toolkit.entrypoint.world import EntrypointError, quote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from toolkit.entrypoint.world import Variables, World

DEFAULT_LIMIT = 10  # seconds
LONGEST_LIMIT = 86400
RETRY_EVERY = 0.2  # seconds


def check_rendezvous(world: World, variables: Variables) -> int:
    """Check what this rank can check, and answer with the port to use.

    The port is the World's, except where a process that is alone finds the one derived for it
    taken: nobody else has to know, so it takes the next that is free.

    Raises:
        EntrypointError: the address does not resolve, or the port cannot be bound (76).
    """
    if world.master_addr != LOOPBACK:
        limit = variables.number("TOOLKIT_RENDEZVOUS_TIMEOUT")[0] or DEFAULT_LIMIT
        check_address(world, min(limit, LONGEST_LIMIT))
    if world.have_met or world.rank != 0:
        return world.master_port
    failure = bind(world.master_port)
    if failure is None:
        return world.master_port
    if world.world_size == 1 and world.sources["master_port"] != "MASTER_PORT":
        for ahead in range(1, 100):
            port = LOWEST_PORT + (world.master_port - LOWEST_PORT + ahead) % PRIME
            if bind(port) is None:
                return port
    where = f"{world.master_addr}:{world.master_port}"
    if failure.errno == errno.EADDRINUSE:
        what = f"{where} is in use: another process on this node listens on that port"
    else:
        what = f"{where} cannot be bound: {failure.strerror}"
    raise EntrypointError(
        f"{what} (it came from {world.sources['master_port']}). Set MASTER_PORT to a free port, "
        "the same on every rank.",
        codes.RENDEZVOUS,
        world.rank,
    )


def bind(port: int) -> OSError | None:
    """Bind ``port`` on all interfaces as torch's store will, and let go; the error, if any."""
    failure = None
    # IPv6 first: where it is there, such a socket takes IPv4 as well.
    for family, address in ((_socket.AF_INET6, "::"), (_socket.AF_INET, "")):
        try:
            trial = _socket.socket(family, _socket.SOCK_STREAM)
        except OSError as error:
            failure = error
            continue
        try:
            trial.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            if family == _socket.AF_INET6:
                trial.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
            trial.bind((address, port))
        except OSError as error:
            failure = error
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error
        else:
            return None
        finally:
            trial.close()
    return failure


def check_address(world: World, limit: int) -> None:
    """Wait up to ``limit`` seconds for MASTER_ADDR to resolve.

    The resolver cannot be told to stop, so it runs in a thread that is left behind.

    Raises:
        EntrypointError: the name is unknown, or the limit has passed (76).
    """
    host = world.master_addr
    outcome: list[OSError | None] = []
    done = _thread.allocate_lock()
    done.acquire()
    deadline = time.monotonic() + limit
    _thread.start_new_thread(look_up, (host, world.master_port, deadline, outcome, done))
    answered = done.acquire(True, limit)
    error = outcome[0] if answered else None
    if answered and error is None:
        return
    if error is not None:
        what = f"does not resolve on this node ({error.args[-1]})"
    else:
        what = f"was not resolved within {limit} s (TOOLKIT_RENDEZVOUS_TIMEOUT)"
    raise EntrypointError(
        f"The host name {quote(host)} {what}; it came from {world.sources['master_addr']}. Set "
        "MASTER_ADDR to an address of rank 0's node that every node can reach.",
        codes.RENDEZVOUS,
        world.rank,
    )


def look_up(
    host: str,
    port: int,
    deadline: float,
    outcome: list[OSError | None],
    done: _thread.LockType,
) -> None:
    """Resolve ``host``, again while the resolver says "try again"; append None or the error."""
    while True:
        try:
            # Bytes, since a str would pull in the idna codec.
            _socket.getaddrinfo(os.fsencode(host), port, 0, _socket.SOCK_STREAM)
            outcome.append(None)
        except OSError as error:
            again = error.errno == _socket.EAI_AGAIN and time.monotonic() + RETRY_EVERY < deadline
            if again:
                time.sleep(RETRY_EVERY)
                continue
            outcome.append(error)
        done.release()
        return
