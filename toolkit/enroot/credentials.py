"""enroot's credentials file: what belongs into it, and what is wrong with it.

The file is netrc, but enroot reads it with grep and awk before curl does, so it must be one line an
entry, ``machine HOST login USER password SECRET``, in this order and from the line's start; HOST
has no port. A password that begins with ``$`` is a shell expression, evaluated at each use. Where a
token server gives the tokens, curl looks for *its* host, while enroot finds the user by the
registry's: both need a line. Source: enroot 3.5 and 4.1, ``docker.sh`` and ``common.sh``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.entrypoint.run_files import write_whole
from toolkit.errors import CredentialsError, UsageError
from toolkit.image.reference import DOCKER_HUB, HOST, HUB_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

NGC = "nvcr.io"
NGC_USER = "$oauthtoken"  # literally; it is no variable

#: Machines that need a line each, for registries whose token server is elsewhere.
_MACHINES = {
    DOCKER_HUB: (HUB_NAMES[-1], "auth.docker.io"),
    NGC: (NGC, "authn.nvidia.com"),
    "registry.gitlab.com": ("registry.gitlab.com", "gitlab.com"),
}
_ECR = re.compile(r"\d{12}\.dkr[.-]ecr(?:-fips)?\.(?P<region>[a-z0-9-]+)\.(?:amazonaws|on)\..+")
_ENTRY = re.compile(r"machine\s+(\S+)\s+login\s+(\S+)\s+password\s+(\$.*\S|\S+)\s*(#.*)?")
_HARMLESS = re.compile(r"[^\s\"'\\*?\[\]]+")


@dataclass(frozen=True)
class Entry:
    machine: str
    """A host, without a port."""
    login: str
    password: str = field(repr=False)
    """As the file has it: where it begins with ``$``, a shell expression."""

    def line(self) -> str:
        return f"machine {self.machine} login {self.login} password {self.password}"


@dataclass(frozen=True)
class Item:
    """A piece of the file: an entry, or lines that are kept as they are."""

    text: str = field(repr=False)
    entry: Entry | None = None
    problem: str = ""
    """Why enroot does not find the entry as it stands."""


def registry_name(text: str) -> str:
    """The registry (host and port, or ``docker.io``) of a host, a URL or an image reference.

    Raises:
        UsageError: Where it is none.
    """
    name = re.sub(r"^[a-z]+://", "", text.strip()).partition("/")[0].partition("#")[0]
    host = HOST.fullmatch(name)
    if not host or int(host["port"] or 0) > 65535 or not re.search(r"[.:]|^localhost$", name):
        # A password may have been typed where the registry goes.
        shown = repr(text) if _HARMLESS.fullmatch(text) and "@" not in text else "the argument"
        msg = f"{shown} is not a registry: write HOST or HOST:PORT, such as nvcr.io or docker.io."
        raise UsageError(msg)
    name = name.lower()
    return DOCKER_HUB if name in {*HUB_NAMES, "auth.docker.io", "hub.docker.com"} else name


def host_of(registry: str) -> str:
    """A registry's host without the port; enroot cuts at the last colon."""
    return re.sub(r":\d+$", "", registry)


def machines(registry: str, token_host: str | None = None) -> tuple[str, ...]:
    """The hosts that need a line for ``registry``.

    Args:
        registry: host and port, or ``docker.io``.
        token_host: the host of the token server, where the registry named one.
    """
    known = _MACHINES.get(registry, (host_of(registry),))
    return tuple(dict.fromkeys([*known, *([host_of(token_host)] if token_host else [])]))


def known(registry: str) -> bool:
    """Whether it is known without asking which hosts need a line for ``registry``."""
    return registry in _MACHINES or command_for(registry) is not None


def user_for(registry: str, given: str | None) -> str | None:
    """The user name: what the registry wants whoever asks, else the given one.

    Raises:
        CredentialsError: Where another one was given than the registry wants.
    """
    wanted = NGC_USER if registry == NGC else "AWS" if _ECR.fullmatch(registry) else None
    if wanted and given not in {None, wanted}:
        msg = f"--username {given}: {registry} knows one user name only, {wanted}; leave it out."
        raise CredentialsError(msg)
    return wanted or given


def command_for(registry: str) -> str | None:
    """The expression that asks for a fresh password at each use, where a registry has one."""
    ecr = _ECR.fullmatch(registry)
    if not ecr:
        return None
    return f"$(aws ecr get-login-password --region {ecr['region']})"


def literal(secret: str) -> str:
    """A password as the file has to spell it.

    Raises:
        CredentialsError: Where the file cannot hold it.
    """
    if not secret or re.search(r"\s|[\x00-\x1f\x7f]", secret) or secret.startswith('"'):
        msg = (
            "the password is empty, has white space in it, or begins with a quotation mark, which"
            " enroot's credentials file cannot hold. Make an access token at the registry and give"
            " that."
        )
        raise CredentialsError(msg)
    if not secret.startswith("$"):
        return secret
    # The shell would take it for a variable; what it prints is not safe from the shell either.
    if not _HARMLESS.fullmatch(secret):
        msg = (
            "the password begins with $ and has quotes, backslashes or wildcards, which enroot's"
            " credentials file cannot hold. Make an access token at the registry and give that."
        )
        raise CredentialsError(msg)
    return f"$(printf %s '{secret}')"


def parse(text: str) -> list[Item]:
    """The pieces of a credentials file, in order; their texts together are ``text``."""
    items: list[Item] = []
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        line = lines[number]
        words = line.split()
        if words and words[0] == "macdef":  # curl takes everything up to an empty line
            end = number + 1
            while end < len(lines) and lines[end].strip():
                end += 1
            items.append(Item("".join(lines[number:end])))
            number = end
            continue
        if not words or words[0] != "machine":
            items.append(Item(line))
            number += 1
            continue
        match = _ENTRY.fullmatch(line.strip())
        if match and (match[3].startswith("$") or not match[4]):
            items.append(_item(line, Entry(match[1], match[2], match[3])))
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].split()[:1] not in (
            ["machine"], ["default"], ["macdef"], [],
        ) and not lines[end].startswith("#"):  # fmt: skip
            end += 1
        items += _loose("".join(lines[number:end]))
        number = end
    return items


def _item(text: str, entry: Entry) -> Item:
    problem = ""
    plain = host_of(re.sub(r"^[a-z]+://", "", entry.machine).partition("/")[0])
    if plain != entry.machine:
        problem = f"machine {entry.machine}: the name must be the host alone, {plain}"
        entry = Entry(plain, entry.login, entry.password)
    elif text[:1].isspace():
        problem = f"machine {entry.machine}: the line must not be indented"
    return Item(text, entry, problem)


def _loose(text: str) -> Iterator[Item]:
    """Entries that are netrc, but not in enroot's one-line form; what is not netrc is kept."""
    for piece in re.findall(r"\s*machine\s(?:(?!\smachine\s)[\s\S])*\s?", text):
        words = re.sub(r"(?m)^\s*#.*$", "", piece).split()
        found = dict(zip(words[::2], words[1::2], strict=False))
        machine = found.get("machine", "?")
        complete = len(words) % 2 == 0 and {"machine", "login", "password"} <= found.keys()
        if not complete or found.keys() - {"machine", "login", "password", "account"}:
            yield Item(piece, None, f"machine {machine}: is not a complete entry")
            continue
        made = _item(piece, Entry(machine, found["login"], found["password"]))
        problem = made.problem or (
            f"machine {machine}: must be one line, `machine HOST login USER password SECRET`"
        )
        yield Item(piece, made.entry, problem)


def merge(text: str, wanted: Iterable[Entry]) -> str:
    """``text`` with the wanted entries in it and what is there repaired; all else is kept.

    A wanted entry stands before others for the same machine, for enroot takes the first.
    """
    new = {entry.machine: entry for entry in wanted}
    left = dict(new)
    lines: list[str] = []
    for item in parse(text):
        entry = item.entry
        if entry is None:
            if item.text.split()[:1] == ["default"]:  # curl looks at nothing behind it
                lines += [f"{left.pop(machine).line()}\n" for machine in list(left)]
            lines.append(item.text if item.text.endswith("\n") else f"{item.text}\n")
            continue
        if entry.machine in left:
            lines.append(f"{left.pop(entry.machine).line()}\n")
        if entry.machine in new and new[entry.machine].login == entry.login:
            continue
        kept = f"{entry.line()}\n" if item.problem else item.text
        lines.append(kept if kept.endswith("\n") else f"{kept}\n")
    return "".join([*lines, *(f"{entry.line()}\n" for entry in left.values())])


def entries(text: str) -> list[Entry]:
    """The logins of a file, those that enroot would not find left out."""
    return [item.entry for item in parse(text) if item.entry and not item.problem]


def find(text: str, machine: str, user: str | None = None) -> Entry | None:
    """The login that enroot takes for a machine: the first, or the given user's."""
    return next(
        (e for e in entries(text) if e.machine == machine and user in {None, e.login}), None
    )


def problems(text: str, mode: int | None) -> list[str]:
    """What is wrong with a file, whatever the registry; no secret is in it.

    Args:
        text: the file.
        mode: its permissions; None where there is no file.
    """
    found = []
    if mode is not None and mode & 0o077:
        found.append(f"its mode is {mode:04o}: others can read your passwords; it must be 0600")
    items = parse(text)
    found += [item.problem for item in items if item.problem]
    hosts = {item.entry.machine for item in items if item.entry}
    for registry, needed in _MACHINES.items():
        missing = [machine for machine in needed if machine not in hosts]
        if hosts.isdisjoint(needed) or missing == [HUB_NAMES[-1]]:  # USER@IMAGE needs no line there
            continue
        if missing:
            there = ", ".join(machine for machine in needed if machine in hosts)
            found.append(
                f"there is a line for {there}, but none for {', '.join(missing)}, which {registry}"
                " needs too"
            )
    for item in items:
        entry = item.entry
        if entry and entry.machine in _MACHINES[NGC] and entry.login != NGC_USER:
            found.append(f"machine {entry.machine}: the login must be {NGC_USER}, literally")
    return found


def read(path: Path) -> tuple[str, int | None]:
    """A file's text and mode; empty and None where there is none.

    Raises:
        CredentialsError: Where it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8"), path.stat().st_mode & 0o777
    except FileNotFoundError:
        return "", None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        msg = f"{path} cannot be read: {reason}. Mend or remove it, then log in again."
        raise CredentialsError(msg) from error


def write(path: Path, text: str) -> None:
    """Write the file, whole or not at all, readable by its owner only.

    Raises:
        CredentialsError: Where it cannot be written.
    """
    try:
        target = path.resolve()  # a link into somebody's collection of dot files stays one
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(target, text, 0o600)
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror}. Nothing was changed."
        raise CredentialsError(msg) from error
