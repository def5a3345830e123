"""What runs inside an image under test, on its own Python (3.8 and up) and without this project.

``toolkit.image.smoke`` packs this file with the entrypoint into one zip file and starts it as
``python3 FILE all|gpu|rank``. Each check prints one JSON object on a line of its own, at once, so
that the checks before a crash are known.
"""
# ruff: noqa: PLC0415 - torch and PyG are what is under test, so each check imports them itself

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
import zipfile

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# Compiled against one torch and one CUDA each; the version says which: 0.5.0+pt213cu130.
COMPILED = ("pyg_lib", "torch_scatter", "torch_sparse", "torch_cluster", "torch_spline_conv")
ENTRYPOINT = "entrypoint.pyz"  # packed beside this file
RANK_SECONDS = 120
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[08-09]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "node[08-09]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}


class FailedError(Exception):
    """What a check found wrong, in one sentence."""


def check_sandbox() -> str:
    """The user, the root file system and the network that the other checks run with."""
    if os.getuid() == 0:
        raise FailedError("runs as root")
    if os.access("/", os.W_OK):
        raise FailedError("the root file system can be written")
    return f"uid {os.getuid()}, read-only root, no network"


def check_python() -> str:
    """The Python of PATH is the one of a login shell too, which is what enroot starts."""
    here = os.path.realpath(os.path.dirname(sys.executable))  # noqa: PTH120
    shell = subprocess.run(
        ["/bin/sh", "-lc", "command -v python3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=30,
        check=False,
    ).stdout.strip()
    if os.path.realpath(os.path.dirname(shell)) != here:  # noqa: PTH120
        raise FailedError(
            f"python3 is {sys.executable}, but {shell or 'not found'} in a login shell, which "
            "enroot starts: set PATH in /etc/profile.d too"
        )
    return f"{platform.python_version()} at {sys.executable}"


def check_torch() -> str:
    """Import torch; PYTORCH_VERSION, where it is set, must be its version."""
    import torch

    declared = os.environ.get("PYTORCH_VERSION", "")
    if declared and numbers(declared) != numbers(torch.__version__):
        raise FailedError(f"torch is {torch.__version__}, but PYTORCH_VERSION is {declared}")
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ", no CUDA"
    note = "" if declared else "; PYTORCH_VERSION is unset, so pyxis sets no rank variables"
    return f"{torch.__version__}{cuda}{note}"


def check_pyg() -> str:
    """Import PyG; a warning of its own at that point is a part that does not work."""
    import torch_geometric

    return str(torch_geometric.__version__)


def check_compiled() -> str:
    """PyG's compiled packages: built for this torch and CUDA, and can be loaded."""
    import torch

    cuda = "cu" + torch.version.cuda.replace(".", "") if torch.version.cuda else "cpu"
    here = "pt{}{}".format(*numbers(torch.__version__)[:2]) + cuda
    found = []
    for name in COMPILED:
        if importlib.util.find_spec(name) is None:
            continue
        version = version_of(name)
        built = re.search(r"pt\d+(cpu|cu\d+)", version)
        if built and built.group() != here:
            raise FailedError(f"{name} {version} does not match torch {torch.__version__} ({here})")
        importlib.import_module(name)
        found.append(f"{name} {version}")
    return ", ".join(found) or "no compiled packages; PyG's NeighborLoader needs pyg-lib"


def check_step() -> str:
    """One forward and backward pass of a two-layer GraphSAGE."""
    import torch
    from torch_geometric.nn import SAGEConv

    torch.manual_seed(0)
    edges = torch.randint(0, 64, (2, 256))
    first, second = SAGEConv(16, 32), SAGEConv(32, 4)
    out = second(first(torch.randn(64, 16), edges).relu(), edges)
    loss = torch.nn.functional.cross_entropy(out, torch.randint(0, 4, (64,)))
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in (*first.parameters(), *second.parameters())]
    if any(g is None or not torch.isfinite(g).all() for g in gradients):
        raise FailedError("a gradient is missing or not finite")
    return f"loss {loss.item():.3f}, {len(gradients)} gradients"


def check_ddp() -> str:
    """Two ranks of DDP in this container, over gloo on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, sys.argv[0], "rank"],
            env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            universal_newlines=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=RANK_SECONDS)[0] for process in ranks]
    except subprocess.TimeoutExpired:
        raise FailedError(f"two ranks did not finish within {RANK_SECONDS} s") from None
    finally:
        for process in ranks:
            process.kill()
    for rank, process in enumerate(ranks):
        if process.returncode:
            last = (said[rank].strip().splitlines() or ["no output"])[-1]
            raise FailedError(f"rank {rank} ended with code {process.returncode}: {last}")
    return "two ranks in one container agree (gloo)"


def check_entrypoint() -> str:
    """The entrypoint finds its rank in what Slurm sets, under this image's Python."""
    with zipfile.ZipFile(sys.argv[0]) as packed:
        file = packed.extract(ENTRYPOINT, tempfile.gettempdir())
    result = subprocess.run(
        [sys.executable, "-I", "-S", file, "--show"],
        env={**os.environ, **SLURM},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    if result.returncode:
        raise FailedError(f"ended with code {result.returncode}: {result.stderr.strip()}")
    world = json.loads(result.stdout)
    expected = {"world_size": 4, "rank": 3, "local_rank": 1, "node_rank": 1}
    got = {key: world[key] for key in expected}
    if got != expected or world["master_addr"] != "node08":
        raise FailedError(f"got {got} and {world['master_addr']} of a Slurm step of 4 on node08")
    return "rank 3 of 4 at node08, from Slurm's variables"


def check_gpu() -> str:
    """Every GPU that is visible: this build of torch has its architecture and can compute on it."""
    import torch

    if not torch.version.cuda:
        raise FailedError(f"torch {torch.__version__} is a build without CUDA")
    if not torch.cuda.is_available():
        raise FailedError(
            f"torch sees no GPU: is the driver there, and new enough for CUDA {torch.version.cuda}?"
        )
    names = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        built = torch.cuda.get_arch_list()
        usable = [arch for arch in built if runs_on(arch, major, minor)]
        name = torch.cuda.get_device_name(index)
        if not usable:
            raise FailedError(f"{name} is sm_{major}{minor}, but torch has {', '.join(built)}")
        square = torch.eye(64, device=f"cuda:{index}") @ torch.ones(64, 64, device=f"cuda:{index}")
        if square.sum().item() != 64 * 64:
            raise FailedError(f"{name} computed a wrong product")
        names.append(f"{name} (sm_{major}{minor})")
    return f"CUDA {torch.version.cuda}: {', '.join(names)}"


def check_nccl() -> str:
    """NCCL can be started and reduces on the GPU."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    value = torch.ones(1024, device="cuda")
    dist.all_reduce(value)
    dist.destroy_process_group()
    if value.sum().item() != 1024:
        raise FailedError("the all-reduce gave a wrong sum")
    return "NCCL " + ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def rank() -> None:
    """One rank of DDP: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=RANK_SECONDS - 30))
    number, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(number)  # DDP must give all ranks rank 0's weights
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), float(number + 1))).sum().backward()
    gradient = next(model.parameters()).grad
    mean = (size + 1) / 2
    assert gradient is not None
    assert torch.allclose(gradient, torch.full((1, 4), mean)), gradient
    total = torch.tensor([number + 1])
    dist.all_reduce(total)
    assert total.item() == size * (size + 1) // 2, total
    dist.barrier()  # nobody leaves while another still needs it
    # Python's end can meet a thread of gloo's that is still there, which aborts the process.
    os._exit(0)


def numbers(version: str) -> list[int]:
    """The first three numbers of a version; NVIDIA's builds append what differs."""
    return [int(part) for part in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3]]


def runs_on(arch: str, major: int, minor: int) -> bool:
    """Whether code for ``arch`` (sm_90, compute_90) runs on a GPU of this compute capability."""
    match = re.fullmatch(r"(sm|compute)_(\d+)(\d)a?", arch)
    if not match:
        return False
    built = (int(match.group(2)), int(match.group(3)))
    if match.group(1) == "compute":  # compiled on the spot, for this and all later ones
        return built <= (major, minor)
    return built[0] == major and built[1] <= minor


def version_of(name: str) -> str:
    """The installed version of a package, by the name it is imported by."""
    for spelling in (name, name.replace("_", "-")):
        try:
            return importlib.metadata.version(spelling)
        except importlib.metadata.PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module(name), "__version__", "of unknown version"))


def run(check: Callable[[], str]) -> dict[str, object]:
    """Run one check; every exception is a failure, and so is a warning about a broken part."""
    began = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ok, detail = True, check()
        except FailedError as error:
            ok, detail = False, str(error)
        except BaseException as error:  # noqa: BLE001 - SystemExit of a broken package too
            last = traceback.format_exception_only(type(error), error)[-1].strip()
            ok, detail = False, last
    broken = [str(w.message).strip() for w in caught if "while importing" in str(w.message)]
    if ok and broken:
        ok, detail = False, broken[0].splitlines()[0]
    return {"ok": ok, "detail": detail, "seconds": round(time.monotonic() - began, 2)}


def versions() -> dict[str, str]:
    """What is installed, without importing it."""
    found = {"python": platform.python_version()}
    for name in ("torch", "torch_geometric", "pyg_lib"):
        try:
            found[name.replace("_", "-")] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


CHECKS = {
    "all": (
        ("sandbox", check_sandbox),
        ("python", check_python),
        ("torch", check_torch),
        ("pyg", check_pyg),
        ("compiled", check_compiled),
        ("step", check_step),
        ("ddp", check_ddp),
        ("entrypoint", check_entrypoint),
    ),
    "gpu": (("gpu", check_gpu), ("nccl", check_nccl)),
}


def main(role: str) -> None:
    """Run one rank, or all checks of a role."""
    if role == "rank":
        rank()
        return
    print(json.dumps({"versions": versions()}), flush=True)
    for name, check in CHECKS[role]:
        print(json.dumps({"check": name, **run(check)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
