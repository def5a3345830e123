"""Where options come from: command line, ``TOOLKIT_*``, ``toolkit.toml``, the cluster's profile.

``toolkit.toml`` stands next to the user's code::

    cluster = "alpha"                 # which profile below applies (only needed with several)

    [job]                             # defaults for this project, named as the options are
    nodes = 2
    container-image = "registry.example.com/team/pyg:1"

    [clusters.alpha]                  # what is particular to one cluster
    partition = "gpu"
    account = "gnn"
"""

from __future__ import annotations

import shlex
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.entrypoint import launchers
from toolkit.errors import UsageError
from toolkit.options import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FILE_NAME = "toolkit.toml"

_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Setting:
    """An option's value and where it came from, as messages name it."""

    value: Any
    source: str


def settings(
    cli: Mapping[str, Any], environ: Mapping[str, str], folder: Path, cluster: str | None = None
) -> dict[str, Setting]:
    """All options that are set anywhere, the strongest source first.

    Args:
        cli: values of the command line; None or an empty list stands for "not given".
        environ: the environment, for ``TOOLKIT_*``.
        folder: where ``toolkit.toml`` is looked for.
        cluster: the profile to take, else ``TOOLKIT_CLUSTER`` or the file's own choice.

    Raises:
        UsageError: if a key is unknown or a value has the wrong type.
    """
    path = folder / FILE_NAME
    file = _read(path) if path.exists() else {}
    _known(file, ("cluster", "clusters", "job"), f"{FILE_NAME}")
    found: dict[str, Setting] = {}
    found.update(_from_table(_profile(file, cluster or environ.get("TOOLKIT_CLUSTER")), FILE_NAME))
    found.update(_from_table(_table(file, "job"), FILE_NAME))
    found.update(_from_environment(environ))
    found.update(
        {
            key: Setting(value, table()[key].typed(value))
            for key, value in cli.items()
            if value is not None and value != []
        }
    )
    return found


def value(found: Mapping[str, Setting], key: str) -> Any:
    """An option's value; None where it is not set."""
    return found[key].value if key in found else None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        msg = f"{path}: not valid TOML: {error}."
        raise UsageError(msg) from error
    except (OSError, UnicodeDecodeError) as error:
        msg = f"{path}: cannot be read: {error}."
        raise UsageError(msg) from error


def _table(parent: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = parent.get(key, {})
    if not isinstance(found, dict):
        msg = f"{FILE_NAME}: {key!r} is {found!r}, but must be a table: write [{key}]."
        raise UsageError(msg)
    return found


def _profile(file: Mapping[str, Any], cluster: str | None) -> dict[str, Any]:
    """The chosen cluster's profile; the only one where there is one and none is chosen."""
    profiles = _table(file, "clusters")
    chosen = cluster or file.get("cluster")
    if chosen is None:
        return _table(profiles, next(iter(profiles))) if len(profiles) == 1 else {}
    if chosen not in profiles:
        _known({str(chosen): None}, profiles, f"{FILE_NAME} [clusters]")
    return _table(profiles, chosen)


def _from_table(values: Mapping[str, Any], file: str) -> dict[str, Setting]:
    renamed = {key.replace("-", "_"): (key, value) for key, value in values.items()}
    _known(renamed, table(), file)
    return {
        key: Setting(
            _typed(value, table()[key].kind, f"{file}: {written}"), f"{file}: {written} = {value!r}"
        )
        for key, (written, value) in renamed.items()
    }


def _typed(value: Any, kind: type, source: str) -> Any:
    if kind is str and type(value) is int:  # mem = 16, time = 60
        return str(value)
    fits = type(value) is kind
    if kind is list:
        fits = fits and all(isinstance(item, str) for item in value)
    if not fits:
        name = {
            int: "a whole number",
            bool: "true or false",
            str: "text",
            list: "a list of text",
        }[kind]
        msg = f"{source} = {value!r}: must be {name}."
        raise UsageError(msg)
    return value


def _from_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    found = {}
    for key, option in table().items():
        name = option.variable
        text = environ.get(name) if name else None
        if not name or not text or (key == "launcher" and renamed(environ)):
            continue
        found[key] = Setting(_parse(text, option.kind, name), f"{name}={text}")
    return found


def renamed(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that have another name by now, under that: TOOLKIT_LAUNCHER was no option's once.

    For one release, as long as the entrypoint understands the old values.
    """
    old = environ.get("TOOLKIT_LAUNCHER")
    if old is None or old == "torchrun" or old not in launchers.names():
        return {}
    return {"TOOLKIT_RANKS_FROM": old}


def _parse(text: str, kind: type, name: str) -> Any:
    """An option's value from the text of a variable; lists are split as a shell splits words."""
    try:
        if kind is int:
            return int(text)
        if kind is bool:
            return _BOOLEANS[text.lower()]
        return shlex.split(text) if kind is list else text
    except (ValueError, KeyError) as error:
        wanted = {int: "a whole number", bool: "true or false"}.get(
            kind, f"a list of shell words ({error})"
        )
        msg = f"{name}={text}: must be {wanted}."
        raise UsageError(msg) from error


def _known(keys: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise UsageError for the first key that is not known, naming the nearest one that is."""
    names = list(known)
    for key in keys:
        if key not in names:
            raise UsageError(f"{where}: {unknown('key', key, names)}")


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """A sentence about an unknown name that offers the nearest known ones."""
    from difflib import get_close_matches  # noqa: PLC0415 - only needed on the way to an error

    names = sorted(known)
    near = get_close_matches(name.replace("-", "_"), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names) or 'none'}."
    return f"unknown {what} {name!r}; {hint}"
