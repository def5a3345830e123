"""Exit codes, and the ones that stand for what Slurm says of a job.

The first failing rank's own code is a run's own; these are for what no rank's code tells.
"""

USAGE = 2  # usage or configuration
BUG = 70  # in the toolkit
RANKS = 71  # ranks or variables that do not add up
BUILD = 72
PUSH = 73  # or a registry
IMPORT = 74
RUN_AGAIN = 75  # preempted, or a node lost
RENDEZVOUS = 76  # an address or a port that cannot be used
CREDENTIALS = 77
UNAVAILABLE = 78  # the cluster or engine lacks something, or the container did not start
SMOKE = 79
STALLED = 80  # no progress within the limit
TIME_LIMIT = 124
NOT_EXECUTABLE = 126  # a shell's own, as the next one
NOT_FOUND = 127
SIGNAL = 128  # and a signal's number
CANCELLED = 130
OUT_OF_MEMORY = 137

#: A job's final state in Slurm's words, where no rank's own code is known.
OF_STATE = {
    "COMPLETED": 0,
    "TIMEOUT": TIME_LIMIT,
    "DEADLINE": TIME_LIMIT,
    "CANCELLED": CANCELLED,
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "NODE_FAIL": RUN_AGAIN,
    "BOOT_FAIL": RUN_AGAIN,
    "PREEMPTED": RUN_AGAIN,
    "REVOKED": RUN_AGAIN,
}
#: And back, of what Slurm or the toolkit ended.
STATE_OF_CODE = {
    0: "COMPLETED",
    TIME_LIMIT: "TIMEOUT",
    CANCELLED: "CANCELLED",
    OUT_OF_MEMORY: "OUT_OF_MEMORY",
    RUN_AGAIN: "PREEMPTED",
}
#: The state that is meant where slurmstepd says why it cancelled something ("DUE TO …").
STATE_OF_REASON = {
    "TIME LIMIT": "TIMEOUT",
    "PREEMPTION": "PREEMPTED",
    "NODE FAILURE": "NODE_FAIL",
}


def of_signal(code: int) -> int:
    """A process's code as a shell gives it: subprocess writes ``-n`` for signal n."""
    return code if code >= 0 else SIGNAL - code
