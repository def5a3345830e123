"""What a machine and a cluster can do: asking (:func:`gather`), apart from judging the answers."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.common.capture import capture
from toolkit.enroot import site
from toolkit.entrypoint.run_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

State = Literal["ok", "warn", "FAIL"]

TIMEOUT_S = 60  # the questions to a machine have limits of their own; a controller may be busy
NODE_TIMEOUT_S = 180  # for a compute node: the queue, and the questions there
GB = 1e9
LITTLE_SPACE = 20 * GB  # a torch image takes 5 while it is imported
#: What its job asks for: a node at once, or none; the answers take seconds.
JOB_FLAGS = ("--time=3", "--immediate=60", "--quiet")
#: pyxis's flags that a job of the toolkit may have; the first three every pyxis knows.
FLAGS = (
    "container-image",
    "container-mounts",
    "container-workdir",
    "container-name",
    "container-mount-home",
    "no-container-mount-home",
    "container-writable",
    "container-env",
)
MEMORY = {"tmpfs", "ramfs"}
LOCAL_ONLY = re.compile(r"lo$|docker|veth|virbr|br-|cni|podman")


@dataclass(frozen=True)
class Check:
    """One line of the doctor's: ``mend`` is what to do about it."""

    name: str
    state: State
    said: str
    mend: str = ""

    def line(self) -> str:
        return f"{self.state:4} {self.name}: {self.said}" + (
            f" -> {self.mend}" if self.mend else ""
        )


@dataclass(frozen=True)
class Facts:
    """Answers. A question without an answer has none here."""

    machine: Mapping[str, list[str]] = field(default_factory=dict)
    """This machine's, as probe.sh prints them."""
    engine: str | None = None
    no_engine: str = ""
    slurm: str | None = None
    """Why there is no Slurm; None where a controller answers."""
    srun: bool = False
    """Whether ``srun`` is on PATH at all."""
    slurm_version: str = ""
    cluster: str = ""
    partitions: tuple[str, ...] = ()
    """``NAME NODES STATE GRES`` of each partition."""
    srun_help: str = ""
    plugstack: str | None = None
    """The text of plugstack.conf and what it includes, where it can be read."""
    node: Mapping[str, list[str]] | None = None
    """A compute node's answers; None where none was asked."""
    no_node: str = ""
    image: Mapping[str, Any] | None = None
    """``name``, ``architecture``, ``cuda``, ``size`` (bytes, compressed) of the image."""
    no_image: str = ""


# ---- asking


def gather(environ: Mapping[str, str], *, srun: Sequence[str] = (), image: str = "") -> Facts:
    """Ask this machine and the cluster; every question has a limit, and none raises.

    Args:
        environ: the environment.
        srun: the command in front of what runs on a compute node; where none is given, none is
            asked.
        image: a reference or file to look at.
    """
    from toolkit.slurm import probe  # noqa: PLC0415 - the same question as `toolkit run` has

    why = probe.unreachable(environ)
    engine, no_engine = _engine(environ)
    found: dict[str, Any] = {
        "machine": parse(_ask(_command(), environ)),
        "engine": engine,
        "no_engine": no_engine,
        "slurm": why,
        "srun": shutil.which("srun", path=environ.get("PATH")) is not None,
    }
    if why is None:
        config = _ask(["scontrol", "show", "config"], environ)
        found |= {
            "slurm_version": _ask(["srun", "--version"], environ).strip().removeprefix("slurm "),
            "cluster": _setting(config, "ClusterName"),
            "partitions": tuple(_ask(["sinfo", "-h", "-o", "%R %D %a %G"], environ).splitlines()),
            "srun_help": _ask(["srun", "--help"], environ),
            "plugstack": _plugstack(_setting(config, "PlugStackConfig"), environ),
        }
        if srun:
            node, found["no_node"] = _node(environ, srun)
            found["node"] = node
    elif srun:
        found["no_node"] = why
    if image:
        found["image"], found["no_image"] = _image(image, environ)
    return Facts(**found)


def _command() -> list[str]:
    script = Path(__file__).with_name("probe.sh").read_text(encoding="utf-8")
    return ["bash", "-c", script, "bash", site.READ]


def parse(text: str) -> dict[str, list[str]]:
    """The answers of probe.sh: values by name, empty ones left out."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, tab, value = line.partition("\t")
        if tab and value.strip():
            found.setdefault(name, []).append(value.strip())
    return found


def _ask(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """What a command prints; nothing where it cannot be run, or takes too long."""
    return capture(argv, TIMEOUT_S, environ).stdout


def _setting(config: str, name: str) -> str:
    match = re.search(rf"^{name}\s*=\s*(\S+)", config, re.MULTILINE)
    return match[1] if match else ""


def _plugstack(path: str, environ: Mapping[str, str]) -> str | None:
    """plugstack.conf, with what it includes; None where it is not here."""
    here = Path(environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    file = Path(path or here / "plugstack.conf")
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
        for match in re.finditer(r"^\s*include\s+(\S+)", text, re.MULTILINE):
            folder = file.parent / Path(match[1]).parent
            for more in sorted(folder.glob(Path(match[1]).name)):
                text += "\n" + more.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None
    return text


def _engine(environ: Mapping[str, str]) -> tuple[str | None, str]:
    from toolkit.errors import ToolkitError  # noqa: PLC0415
    from toolkit.image.engine import connect  # noqa: PLC0415 - docker-py takes its time

    try:
        with connect(None, environ) as engine:
            return str(engine), ""
    except ToolkitError as error:
        return None, str(error)


def _node(
    environ: Mapping[str, str], srun: Sequence[str]
) -> tuple[dict[str, list[str]] | None, str]:
    """A compute node's answers, or why there are none."""
    ran = capture([*srun, *_command()], NODE_TIMEOUT_S, environ)
    if ran.code is None:
        return None, f"a job on a node did not end within {NODE_TIMEOUT_S} s"
    answers = parse(ran.stdout)
    if "host" not in answers:
        said = ran.stderr.strip().splitlines()
        return None, said[-1] if said else "a job on a node printed nothing"
    return answers, ""


def _image(name: str, environ: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
    from toolkit.enroot import importing  # noqa: PLC0415
    from toolkit.enroot.images import squashfs_problem  # noqa: PLC0415
    from toolkit.errors import ToolkitError  # noqa: PLC0415
    from toolkit.image import reference  # noqa: PLC0415

    try:
        parsed = reference.parse(name)
        if parsed.is_file:
            path = Path(parsed.path)
            problem = squashfs_problem(path)
            if problem:
                return None, f"{path}: {problem}"
            return {"name": name, "size": path.stat().st_size}, ""
        return importing.look_up_details(parsed, site.find(environ)), ""
    except ToolkitError as error:
        return None, str(error)


# ---- judging


def judge(facts: Facts) -> list[Check]:
    """All checks of these facts, in the order in which they are shown."""
    checks = [*_machine(facts), *_cluster(facts)]
    if facts.slurm is None:
        checks += _pyxis(facts)
    if facts.node is not None:
        checks += _enroot(facts.node, f"node {_first(facts.node, 'host')}")
        checks += _shared(facts.machine, facts.node)
    elif facts.no_node:
        checks.append(Check("node", "FAIL", f"no compute node was asked: {facts.no_node}"))
    elif "path.enroot" in facts.machine:
        checks += _enroot(facts.machine, "this machine")
    if facts.slurm is None and facts.node is None and not facts.no_node:
        said = "not asked, and may differ from this machine"
        checks.append(Check("compute nodes", "warn", said, "toolkit doctor --on slurm asks one"))
    if facts.image or facts.no_image:
        checks += _about_image(facts)
    return checks


def failed(checks: Sequence[Check]) -> bool:
    return any(check.state == "FAIL" for check in checks)


def _first(answers: Mapping[str, list[str]], name: str) -> str:
    return (answers.get(name) or [""])[0]


def _space(answers: Mapping[str, list[str]], name: str) -> tuple[str, float]:
    """A file system's type and free bytes; ``("", inf)`` where they are not known."""
    words = _first(answers, f"fs.{name}").split()
    if len(words) != 3 or not (words[1] + words[2]).isdigit():
        return "", float("inf")
    return words[0], int(words[1]) * int(words[2])


def _machine(facts: Facts) -> Iterator[Check]:
    if facts.engine:
        yield Check("engine", "ok", facts.engine)
    elif facts.slurm is None:
        yield Check("engine", "ok", "none, and none is needed on a cluster")
    else:
        mend = "install Docker to build images; `toolkit run` trains without one"
        yield Check("engine", "warn", facts.no_engine.rstrip("."), mend)
    kind, free = _space(facts.machine, "cwd")
    if not kind:
        yield Check("disk", "warn", "the space in the current directory is not known")
    elif free < LITTLE_SPACE:
        said = f"{free / GB:.1f} GB are free in the current directory ({kind})"
        yield Check("disk", "warn", said, "runs and images go there; see --runs and --images")
    else:
        yield Check("disk", "ok", f"{free / GB:.0f} GB are free in the current directory ({kind})")


def _cluster(facts: Facts) -> Iterator[Check]:
    if facts.slurm is not None:
        if facts.srun:
            mend = "log in to the cluster, or see SLURM_CONF"
            yield Check("Slurm", "FAIL", facts.slurm, mend)
        else:
            said = f"none here ({facts.slurm}): `toolkit run` trains on this machine"
            yield Check("Slurm", "ok", said)
        return
    name = f" of {facts.cluster}" if facts.cluster else ""
    yield Check("Slurm", "ok", f"{facts.slurm_version}, the controller{name} answers")
    if not facts.partitions:
        yield Check("partitions", "warn", "sinfo shows none that you may use", "ask for an account")
        return
    shown, gpus = [], set()
    for line in facts.partitions:
        partition, nodes, available, gres = (*line.split(None, 3), *[""] * 4)[:4]
        shown.append(f"{partition} ({nodes} nodes, {available})")
        gpus |= set(re.findall(r"gpu(?::[A-Za-z][\w.-]*)?:\d+", gres))
    yield Check("partitions", "ok", ", ".join(dict.fromkeys(shown)))
    if gpus:
        yield Check("GPUs", "ok", f"on each node {', '.join(sorted(gpus))}")
    else:
        yield Check("GPUs", "warn", "no partition has any", "--gpus-per-node cannot be used")


def pyxis_flags(srun_help: str) -> list[str]:
    """The flags of :data:`FLAGS` that ``srun --help`` shows, without dashes."""
    shown = srun_help.replace("--[no-]", "--no-") + srun_help.replace("--[no-]", "--")
    return [flag for flag in FLAGS if re.search(rf"--{flag}(?![\w-])", shown)]


def _pyxis(facts: Facts) -> Iterator[Check]:
    flags = pyxis_flags(facts.srun_help)
    if "container-image" not in flags:
        mend = "ask the administrators for pyxis; without it no job runs in a container"
        yield Check("pyxis", "FAIL", "srun does not know --container-image", mend)
        return
    missing = [f"--{flag}" for flag in FLAGS if flag not in flags]
    if missing:
        mend = "toolkit doctor --save lets run and submit do without"
        yield Check("pyxis", "warn", f"does not know {', '.join(missing)}", mend)
    else:
        yield Check("pyxis", "ok", "srun knows all flags that the toolkit has")
    plugin = re.compile(r"^\s*(?:required|optional)\s+\S*pyxis\S*(.*)$", re.MULTILINE)
    line = plugin.search(facts.plugstack or "")
    if line is None:
        return
    if re.search(r"use_squashfuse=1", line[1]):
        yield Check("image start", "ok", "images are mounted where they lie (use_squashfuse)")
    else:
        said = "every job unpacks its image on every node, 7 to 40 s for 300 MB"
        mend = "administrators: use_squashfuse=1 in plugstack.conf; or --container-name"
        yield Check("image start", "warn", said, mend)


def _enroot(answers: Mapping[str, list[str]], where: str) -> Iterator[Check]:
    if "path.enroot" not in answers:
        yield Check("enroot", "FAIL", f"not on {where}", "administrators: install enroot there")
        return
    version = _first(answers, "enroot.version") or "its version is not known"
    yield Check("enroot", "ok", f"{version} on {where}")
    needed = ("mksquashfs", "unsquashfs", "parallel", "jq", "zstd")
    lacks = [name for name in needed if f"path.{name}" not in answers]
    if lacks:
        yield Check(
            "enroot's tools", "warn", f"{where} lacks {', '.join(lacks)}", "imports fail there"
        )
    why = _no_namespaces(answers)
    if why:
        mend = "administrators: allow unprivileged user namespaces, without which enroot cannot run"
        yield Check("namespaces", "FAIL", f"cannot be made on {where} ({why})", mend)
    else:
        yield Check("namespaces", "ok", f"an ordinary user may make them on {where}")
    yield from _folders(answers, where)
    yield from _hooks(answers, where)
    yield from _network(answers, where)


def _no_namespaces(answers: Mapping[str, list[str]]) -> str:
    """Why an ordinary user can make no namespaces; empty where one can. Root always can."""
    forbidding = {
        "user/max_user_namespaces": "0",
        "kernel/unprivileged_userns_clone": "0",
        "kernel/apparmor_restrict_unprivileged_userns": "1",
    }
    set_ = [
        f"{name.replace('/', '.')}={value}"
        for name, value in forbidding.items()
        if _first(answers, f"sysctl.{name}") == value
    ]
    if _first(answers, "namespaces") == "yes" and (not set_ or _first(answers, "uid") != "0"):
        return ""
    return ", ".join(set_) or "no setting says why"


def _folders(answers: Mapping[str, list[str]], where: str) -> Iterator[Check]:
    for name in ("ENROOT_TEMP_PATH", "ENROOT_CACHE_PATH", "ENROOT_DATA_PATH"):
        kind, free = _space(answers, name)
        path = _first(answers, name)
        if not path:
            continue
        if kind in MEMORY:
            said = f"{path} on {where} is memory ({kind}, {free / GB:.1f} GB), which an image fills"
            mend = f"point {name} to a disk; `toolkit enroot install --system` does"
            yield Check(name, "warn", said, mend)
        elif free < LITTLE_SPACE:
            said = f"{free / GB:.1f} GB are free in {path} on {where}"
            yield Check(name, "warn", said, f"free some, or point {name} elsewhere")
        else:
            yield Check(name, "ok", f"{path} on {where} ({kind}, {free / GB:.0f} GB free)")
    options = _first(answers, "ENROOT_SQUASH_OPTIONS")
    if options and "zstd" not in options:
        said = f"{options}: imports by pyxis are slow or large"
        yield Check("squashfs options", "warn", said, "`toolkit import` has its own, faster ones")


def _hooks(answers: Mapping[str, list[str]], where: str) -> Iterator[Check]:
    hooks = answers.get("hook", [])
    if "60-toolkit-ranks.sh" in hooks:
        yield Check("rank hook", "ok", f"the toolkit's is installed on {where}")
    elif "50-slurm-pytorch.sh" in hooks:
        said = "enroot's own is enabled, which acts only in images with PYTORCH_VERSION"
        yield Check("rank hook", "ok", f"{said}; `toolkit run` needs none")
    else:
        yield Check("rank hook", "ok", "none; `toolkit run` needs none, a plain srun may")
    if "50-slurm-pytorch.sh" in hooks and "path.scontrol" not in answers:
        said = f"not on {where}, so enroot's 50-slurm-pytorch sets no MASTER_ADDR there"
        yield Check(
            "scontrol", "warn", said, "`toolkit run` does without; or toolkit enroot install"
        )
    if "98-nvidia.sh" in hooks and "gpu" in answers and "path.nvidia-container-cli" not in answers:
        mend = "administrators: install libnvidia-container-tools"
        said = f"not on {where}: containers for GPUs do not start"
        yield Check("nvidia-container-cli", "FAIL", said, mend)


def _network(answers: Mapping[str, list[str]], where: str) -> Iterator[Check]:
    if "gpu" in answers:
        yield Check("driver", "ok", f"{answers['gpu'][0]}, CUDA {_first(answers, 'cuda') or '?'}")
    devices = answers.get("infiniband", [])
    if devices:
        yield Check("network", "ok", f"{where} has InfiniBand or RoCE: {', '.join(devices)}")
        return
    names = [name for name in answers.get("interface", []) if not LOCAL_ONLY.match(name)]
    if len(names) > 1:
        said = f"{where} has {', '.join(names)}, of which NCCL and gloo choose by themselves"
        mend = "if ranks cannot meet: --env NCCL_SOCKET_IFNAME=NAME --env GLOO_SOCKET_IFNAME=NAME"
        yield Check("network", "warn", said, mend)
    elif names:
        yield Check("network", "ok", f"{where} has {names[0]}")


def _shared(here: Mapping[str, list[str]], node: Mapping[str, list[str]]) -> Iterator[Check]:
    for name, what in (("cwd", "the current directory"), ("home", "the home directory")):
        ours, theirs = _first(here, f"inode.{name}"), _first(node, f"inode.{name}")
        if not ours or not theirs:
            continue
        if ours == theirs:
            yield Check(f"shared {name}", "ok", f"{what} is the same on {_first(node, 'host')}")
        elif name == "cwd":
            mend = "work in a directory on shared storage, where the runs are seen by all nodes"
            yield Check("shared cwd", "FAIL", f"{what} is another one on the node", mend)
        else:
            mend = "--runs and --images must be elsewhere; logins must be made on the nodes too"
            yield Check("shared home", "warn", f"{what} is another one on the node", mend)


def _about_image(facts: Facts) -> Iterator[Check]:
    if facts.image is None:
        yield Check("image", "FAIL", facts.no_image.rstrip("."))
        return
    image, answers = facts.image, facts.node or facts.machine
    yield Check("image", "ok", f"{image['name']}, {image['size'] / GB:.1f} GB compressed")
    from toolkit.image.reference import ARCHITECTURES  # noqa: PLC0415

    machine = ARCHITECTURES.get(_first(answers, "arch"), _first(answers, "arch"))
    wanted = image.get("architecture")
    if wanted and machine and wanted != machine:
        said = f"is for {wanted}, and {_first(answers, 'host')} is {machine}"
        yield Check("architecture", "FAIL", said, f"build it for linux/{machine}")
    cuda, driver = image.get("cuda"), _first(answers, "cuda")
    if cuda and driver and _numbers(cuda) > _numbers(driver):
        said = f"the image has CUDA {cuda}, the driver supports {driver}"
        same = _numbers(cuda)[:1] == _numbers(driver)[:1]
        mend = "it works within a major version" if same else f"take an image with CUDA {driver}"
        yield Check("CUDA", "warn" if same else "FAIL", said, mend)
    kind, free = _space(answers, "ENROOT_DATA_PATH")
    if free < image["size"] * 3.5:
        said = (
            f"unpacked it takes about {image['size'] * 3.5 / GB:.1f} GB, {free / GB:.1f} are free"
        )
        mend = "use toolkit import and direct start, or another ENROOT_DATA_PATH"
        yield Check("image space", "warn", f"{said} ({kind})", mend)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)][:2]


# ---- saving


def learned(facts: Facts) -> dict[str, list[str]]:
    """What run and submit go by, as keys of a cluster's profile."""
    flags = pyxis_flags(facts.srun_help)
    return {"pyxis-flags": flags} if flags else {}


def with_profile(text: str, cluster: str, values: Mapping[str, list[str]], now: float) -> str:
    """``toolkit.toml`` with ``values`` in the cluster's table; all else is kept as it is."""
    header = f"[clusters.{cluster}]"
    date = time.strftime("%F", time.localtime(now))
    # A list of JSON is one of TOML too.
    new = [
        f"{key} = {json.dumps(items)}  # toolkit doctor, {date}" for key, items in values.items()
    ]
    lines = text.splitlines()
    if header not in (line.strip() for line in lines):
        gap = [""] if lines else []
        return "\n".join([*lines, *gap, header, *new, ""])
    start = next(i for i, line in enumerate(lines) if line.strip() == header) + 1
    end = next(
        (i for i in range(start, len(lines)) if lines[i].lstrip().startswith("[")), len(lines)
    )
    kept = [line for line in lines[start:end] if line.partition("=")[0].strip() not in values]
    return "\n".join([*lines[:start], *new, *kept, *lines[end:], ""])


def save(facts: Facts, path: Path) -> str:
    """Write what was learned into ``toolkit.toml``; the cluster's name there.

    Raises:
        UsageError: Where the file is damaged.
    """
    from toolkit import config  # noqa: PLC0415

    text = path.read_text(encoding="utf-8") if path.exists() else ""
    cluster = re.sub(r"[^\w-]", "-", facts.cluster or "cluster")
    config.settings({}, {}, path.parent)  # a damaged file is told, not written over
    made = with_profile(text, cluster, learned(facts), time.time())
    write_whole(path, made)
    return cluster
