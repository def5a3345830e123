"""Make ``files/debian12.npz`` from the package index of a Debian machine.

    apt-get update
    apt-cache dumpavail | python -m workloads.datasets.make_debian OUTPUT.npz

The same index gives the same bytes: nothing here depends on the clock, on hash seeds or on the
order of the index. What is taken, and what is left out, is in ``DATA.md``.
"""

from __future__ import annotations

import hashlib
import re
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

NUM_FEATURES = 512
SPLIT = (0.5, 0.1)  # train, validation; the rest is for testing
MIN_CLASS = 10  # a section with fewer packages cannot be split, learnt and tested

_FIELDS = ("Package", "Section", "Filename", "Description", "Depends", "Recommends")


def stanzas(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the wanted fields of each stanza of ``apt-cache dumpavail`` (deb822 text)."""
    stanza: dict[str, str] = {}
    field = ""
    for raw in lines:
        line = raw.rstrip("\n")
        if not line.strip():
            if stanza:
                yield stanza
            stanza, field = {}, ""
        elif line[0] in " \t":  # a continuation; the extended description is not in every index
            if field in ("Depends", "Recommends"):
                stanza[field] += line
        else:
            field, _, value = line.partition(":")
            if field in _FIELDS:
                stanza[field] = value.strip()
    if stanza:
        yield stanza


def relations(text: str) -> Iterator[str]:
    """Yield the package names in a Depends field: ``a (>= 1) | b:any, c`` gives a, b and c."""
    for item in re.split(r"[,|]", text):
        name = re.split(r"[\s(:\[<]", item.strip(), maxsplit=1)[0]
        if name:
            yield name


def words(description: str) -> set[int]:
    """Hash the words of a one-line description into columns of the feature matrix."""
    return {
        zlib.crc32(word.encode()) % NUM_FEATURES
        for word in re.findall(r"[a-z0-9+]+", description.lower())
        if len(word) > 1
    }


def make(lines: Iterable[str]) -> dict[str, np.ndarray]:
    """Turn a package index into the arrays of the data set.

    Returns:
        ``classes`` (the section names), ``y`` (one class a node), ``train``, ``val`` and ``test``
        (node numbers), and two ragged arrays, each as the length of every row and the differences
        between its ascending entries: ``edge_count``/``edge_delta`` (package to dependency) and
        ``word_count``/``word_delta`` (the features that are 1).
    """
    packages: dict[str, dict[str, str]] = {}
    for stanza in stanzas(lines):
        name, section = stanza.get("Package", ""), stanza.get("Section", "")
        # main alone (a section of contrib or non-free has a slash), and only what is in an archive.
        if name and section and "/" not in section and stanza.get("Filename"):
            # One node a name: of several versions the one whose file sorts last, in any order read.
            packages[name] = max(stanza, packages.get(name, stanza), key=lambda s: s["Filename"])

    size: dict[str, int] = {}
    for stanza in packages.values():
        size[stanza["Section"]] = size.get(stanza["Section"], 0) + 1
    names = sorted(n for n, s in packages.items() if size[s["Section"]] >= MIN_CLASS)
    classes = sorted({packages[n]["Section"] for n in names})
    node, label = {n: i for i, n in enumerate(names)}, {c: i for i, c in enumerate(classes)}

    edges, features = [], []
    for name in names:
        stanza = packages[name]
        wanted = f"{stanza.get('Depends', '')},{stanza.get('Recommends', '')}"
        # A virtual package (or one that is not in main) has no node, so an edge to it is dropped.
        targets = {node[other] for other in relations(wanted) if other in node}
        edges.append(sorted(targets - {node[name]}))
        features.append(sorted(words(stanza.get("Description", ""))))

    # The split follows a hash of the name, so that one package more does not shuffle the others.
    order = sorted(range(len(names)), key=lambda i: hashlib.sha256(names[i].encode()).digest())
    first = round(SPLIT[0] * len(names))
    second = first + round(SPLIT[1] * len(names))
    edge_count, edge_delta = _ragged(edges)
    word_count, word_delta = _ragged(features)
    return {
        "classes": np.array(classes),
        "y": np.array([label[packages[n]["Section"]] for n in names], dtype=np.uint8),
        "train": np.array(sorted(order[:first]), dtype=np.int32),
        "val": np.array(sorted(order[first:second]), dtype=np.int32),
        "test": np.array(sorted(order[second:]), dtype=np.int32),
        "edge_count": edge_count,
        "edge_delta": edge_delta,
        "word_count": word_count,
        "word_delta": word_delta,
    }


def _ragged(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    count = np.array([len(row) for row in rows], dtype=np.uint16)
    delta = [np.diff(np.array(row, dtype=np.int32), prepend=0) for row in rows]
    return count, np.concatenate([*delta, np.empty(0)]).astype(np.int32)


def main() -> int:
    """Read an index on stdin and write the data set."""
    if len(sys.argv) != 2:
        print("usage: apt-cache dumpavail | make_debian OUTPUT.npz", file=sys.stderr)
        return 2
    arrays = make(sys.stdin)
    np.savez_compressed(Path(sys.argv[1]), **arrays)  # type: ignore[arg-type]
    print(
        f"{len(arrays['y'])} nodes, {len(arrays['edge_delta'])} edges, "
        f"{len(arrays['classes'])} classes, {len(arrays['word_delta'])} words, "
        f"{Path(sys.argv[1]).stat().st_size} bytes"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
