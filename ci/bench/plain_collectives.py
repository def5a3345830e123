"""Collectives timed by a plain gloo loop that shares no code with the toolkit; see ``allreduce``.

    srun -N2 python3 plain_collectives.py /shared/a-new-file 1024,65536

Prints, on rank 0, ``{"all_reduce": {"1024": seconds a call}, …}``; a call takes as long as on its
slowest rank.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

rank, ranks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_STEP_NUM_TASKS"])
sizes = [int(size) for size in sys.argv[2].split(",")]
meet = f"file://{sys.argv[1]}"
dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
found: dict[str, dict[str, float]] = {"all_reduce": {}, "all_gather": {}, "broadcast": {}}
for name, row in found.items():
    for size in sizes:
        # Zeros that nobody has written yet are one page of the system's, and fast to read.
        whole = torch.ones(size // 4).zero_()
        part = torch.ones(size // 4 // ranks)
        parts = [torch.ones_like(part) for _ in range(ranks)]
        loop: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
            "all_reduce": (dist.all_reduce, (whole,)),
            "all_gather": (dist.all_gather, (parts, part)),
            "broadcast": (dist.broadcast, (whole, 0)),
        }
        call, arguments = loop[name]
        # A round of a tenth of a second, as the toolkit's: shorter ones miss, in their median, what
        # now and then holds up a process on a busy machine.
        calls, rounds = 2, []
        for number in range(6):
            dist.all_reduce(torch.zeros(1))  # all begin together
            begun = time.perf_counter()
            for _ in range(calls):
                call(*arguments)
            taken = torch.tensor((time.perf_counter() - begun) / calls)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number == 0:  # to warm up, and to count
                calls = max(4, min(1000, round(0.1 / taken.item())))
            else:
                rounds.append(taken.item())
        row[str(size)] = statistics.median(rounds)
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
