"""Slurm's host list and tasks-per-node syntax, read without ``scontrol``.

Both come from outside and may be anything, so sizes are counted before anything is made.
"""

from __future__ import annotations

from toolkit.entrypoint.world import EntrypointError, quote

LIMIT = 1_000_000  # names, or nodes: more than any cluster has
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:+")
_MAX_DIGITS = 18


class Named:
    """A text and the variable that it came from, for errors."""

    def __init__(self, expression: str, source: str):
        self.expression = expression
        self.shown = f"{source}={quote(expression)}" if source else quote(expression)

    def malformed(self, why: str) -> EntrypointError:
        """The error for a text that cannot be read."""
        return EntrypointError(f"{self.shown} is not a Slurm list: {why}.")

    def too_many(self) -> EntrypointError:
        """The error for a text that would fill the memory."""
        return EntrypointError(f"{self.shown} stands for more than {LIMIT:,} hosts.")


def expand(expression: str, source: str = "") -> list[str]:
    """The names in a Slurm host list, in order, duplicates kept.

    ``node[08-10,012]-ib,login1`` is node08-ib, node09-ib, node10-ib, node012-ib, login1: each
    item of a bracket is padded to the width of its own lower bound. Of several brackets the last
    varies fastest. Names are set apart by commas or white space. ``source`` is the variable that
    the expression came from, for errors.

    Raises:
        EntrypointError: the text is malformed, names nothing, or names more than 1,000,000 hosts.
    """
    names: list[str] = []
    named = Named(expression, source)
    for item in _split(named):
        parts, brackets = _parts(item, named)
        total = 1
        for part in parts:
            total *= len(part)
            if len(names) + total > LIMIT:
                raise named.too_many()
        names += _combine(parts, brackets)
    if not names:
        raise named.malformed("it names no host")
    return names


def tasks_per_node(expression: str, source: str = "") -> list[int]:
    """The tasks on each node from Slurm's form, such as ``4(x2),1`` for 4, 4 and 1.

    Raises:
        EntrypointError: the text is malformed, or stands for more than 1,000,000 nodes.
    """
    tasks: list[int] = []
    named = Named(expression, source)
    for item in expression.split(","):
        count, repeated, times = item.partition("(x")
        repeat = 1
        if repeated:
            if not times.endswith(")"):
                raise named.malformed("a '(x' has no ')'")
            repeat = _bounded(times[:-1], named)
        each = _bounded(count, named)
        if each == 0 or repeat == 0:
            raise named.malformed("a count is 0")
        if len(tasks) + repeat > LIMIT:
            raise named.too_many()
        tasks += [each] * repeat
    return tasks


def _split(named: Named) -> list[str]:
    """Split at commas and white space outside brackets; empty items are dropped, as Slurm does."""
    items = []
    start = 0
    inside = False
    for at, char in enumerate(named.expression):
        if char == "[":
            if inside:
                raise named.malformed("a '[' stands inside a '['")
            inside = True
        elif char == "]":
            if not inside:
                raise named.malformed("a ']' has no '['")
            inside = False
        elif not inside and (char == "," or char.isspace()):
            items.append(named.expression[start:at])
            start = at + 1
    if inside:
        raise named.malformed("a '[' has no ']'")
    items.append(named.expression[start:])
    return [item for item in items if item]


def _parts(item: str, named: Named) -> tuple[list[list[str]], list[int]]:
    """``a[1-2]b`` as ``[["a"], ["1", "2"], ["b"]]``, and where in it the brackets are: ``[1]``."""
    parts: list[list[str]] = []
    brackets: list[int] = []
    for number, piece in enumerate(item.split("[")):
        literal = piece
        if number:
            bracket, _, literal = piece.partition("]")
            brackets.append(len(parts))
            parts.append(_bracket(bracket, named))
        if literal:
            if not _NAME.issuperset(literal):
                raise named.malformed(f"{quote(literal)} cannot be part of a host's name")
            parts.append([literal])
    return parts, brackets


def _combine(parts: list[list[str]], brackets: list[int]) -> list[str]:
    """All names of ``_parts``, in Slurm's order, measured with scontrol 22.05.8 and 24.11.5.

    The last bracket is the innermost loop; around it stand the first, the second and so on, so
    that the last but one varies slowest: a[1-2]b[3-4]c[5-6] begins a1b3c5, a1b3c6, a2b3c5.
    """
    rows = [[part[0] for part in parts]]
    for at in [*reversed(brackets[:-1]), *brackets[-1:]]:
        rows = [[*row[:at], value, *row[at + 1 :]] for row in rows for value in parts[at]]
    return ["".join(row) for row in rows]


def _bracket(bracket: str, named: Named) -> list[str]:
    values: list[str] = []
    for item in bracket.split(","):
        low, ranged, high = item.partition("-")
        first = _bounded(low, named)
        last = _bounded(high, named) if ranged else first
        if last < first:
            raise named.malformed(f"the range {quote(item)} runs backwards")
        if len(values) + last - first + 1 > LIMIT:
            raise named.too_many()
        width = len(low)
        values += [str(value).zfill(width) for value in range(first, last + 1)]
    return values


def _bounded(digits: str, named: Named) -> int:
    if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS:
        return int(digits)
    raise named.malformed(f"{quote(digits)} stands where a number should")
