"""Slurm's host list and tasks-per-node syntax, read without ``scontrol``.

Both come from outside and may be anything, so sizes are counted before anything is made.
"""

from __future__ import annotations

from toolkit.entrypoint.world import EntrypointError, quote

LIMIT = 1_000_000  # names, or nodes: more than any cluster has
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:+")
_MAX_DIGITS = 18


def expand(expression: str) -> list[str]:
    """The names in a Slurm host list, in order, duplicates kept.

    ``node[08-10,012]-ib,login1`` is node08-ib, node09-ib, node10-ib, node012-ib, login1: each
    item of a bracket is padded to the width of its own lower bound, and of several brackets the
    last varies fastest. Names are set apart by commas or white space.

    Raises:
        EntrypointError: the text is malformed, names nothing, or names more than 1,000,000 hosts.
    """
    names: list[str] = []
    for item in _split(expression):
        # Each part is a literal or the list of values of one bracket.
        total = 1
        made = [""]
        for part in _parts(item, expression):
            total *= len(part)
            if len(names) + total > LIMIT:
                raise _too_many(expression)
            made = [head + tail for head in made for tail in part]
        names += made
    if not names:
        raise _malformed(expression, "it names no host")
    return names


def tasks_per_node(expression: str) -> list[int]:
    """The tasks on each node from Slurm's form, such as ``4(x2),1`` for 4, 4 and 1.

    Raises:
        EntrypointError: the text is malformed, or stands for more than 1,000,000 nodes.
    """
    tasks: list[int] = []
    for item in expression.split(","):
        count, repeated, times = item.partition("(x")
        repeat = 1
        if repeated:
            if not times.endswith(")"):
                raise _malformed(expression, "a '(x' has no ')'")
            repeat = _bounded(times[:-1], expression)
        each = _bounded(count, expression)
        if each == 0 or repeat == 0:
            raise _malformed(expression, "a count is 0")
        if len(tasks) + repeat > LIMIT:
            raise _too_many(expression)
        tasks += [each] * repeat
    return tasks


def _split(expression: str) -> list[str]:
    """Split at commas and white space outside brackets; empty items are dropped, as Slurm does."""
    items = []
    start = 0
    inside = False
    for at, char in enumerate(expression):
        if char == "[":
            if inside:
                raise _malformed(expression, "a '[' stands inside a '['")
            inside = True
        elif char == "]":
            if not inside:
                raise _malformed(expression, "a ']' has no '['")
            inside = False
        elif not inside and (char == "," or char.isspace()):
            items.append(expression[start:at])
            start = at + 1
    if inside:
        raise _malformed(expression, "a '[' has no ']'")
    items.append(expression[start:])
    return [item for item in items if item]


def _parts(item: str, expression: str) -> list[list[str]]:
    """``a[1-2]b`` as ``[["a"], ["1", "2"], ["b"]]``."""
    parts = []
    for number, piece in enumerate(item.split("[")):
        literal = piece
        if number:
            bracket, _, literal = piece.partition("]")
            parts.append(_bracket(bracket, expression))
        if literal:
            if not _NAME.issuperset(literal):
                raise _malformed(expression, f"{quote(literal)} cannot be part of a host's name")
            parts.append([literal])
    return parts


def _bracket(bracket: str, expression: str) -> list[str]:
    values: list[str] = []
    for item in bracket.split(","):
        low, ranged, high = item.partition("-")
        first = _bounded(low, expression)
        last = _bounded(high, expression) if ranged else first
        if last < first:
            raise _malformed(expression, f"the range {quote(item)} runs backwards")
        if len(values) + last - first + 1 > LIMIT:
            raise _too_many(expression)
        width = len(low)
        values += [str(value).zfill(width) for value in range(first, last + 1)]
    return values


def _bounded(digits: str, expression: str) -> int:
    if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS:
        return int(digits)
    raise _malformed(expression, f"{quote(digits)} stands where a number should")


def _malformed(expression: str, why: str) -> EntrypointError:
    return EntrypointError(f"{quote(expression)} is not a Slurm list: {why}.")


def _too_many(expression: str) -> EntrypointError:
    return EntrypointError(f"{quote(expression)} stands for more than {LIMIT:,} hosts.")
