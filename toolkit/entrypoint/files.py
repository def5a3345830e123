"""How many files may be open at once: the first limit that a large run meets.

Many systems give a process 1,024 unless it asks for more (setrlimit(2): up to the hard limit, with
no privilege). Rank 0 holds a connection to every rank, gloo one to each pair, and ``toolkit run``
a log for every rank.
"""

from __future__ import annotations

import resource

SPARE = 512  # what torch, NCCL and the user's program open besides


def allow(wanted: int) -> int:
    """Raise this process's limit to ``wanted`` open files, or as near as it may; never lower it.

    Returns:
        How many may be open from now on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft >= 0 else wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed
