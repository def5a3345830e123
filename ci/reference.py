"""OPTIONS.md from the table of options: ``python ci/reference.py``; ``--check`` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from toolkit.options import Option, Said, table

FILE = Path(__file__).parents[1] / "OPTIONS.md"
HEAD = """\
# Options of a job

Made from the table in `toolkit/options.py` by `python ci/reference.py`. Of several sources the
first counts: the command line, the variable, `[job]` of `toolkit.toml`, the cluster's profile.
Options marked *batch* are those of `toolkit submit` alone.

| on the command line | in `toolkit.toml` | variable | meaning | said to Slurm |
|---|---|---|---|---|
"""
WHERE = {
    Said.NOWHERE: "",
    Said.LAYOUT: "srun, sbatch: `--{}`",
    Said.JOB: "srun of a job, sbatch: `--{}`",
    Said.LIMIT: "srun of a job or step, sbatch: `--{}`",
    Said.HEAD: "sbatch: `--{}`",
    Said.PYXIS: "srun: `--{}`",
    Said.AS_WRITTEN: "as it is written",
}


def row(option: Option) -> str:
    """One line of the table."""
    flags = ", ".join(f"`{flag}`" for flag in option.flags) or "(none)"
    variable = f"`{option.variable}`" if option.variable else "(none)"
    mark = " *batch*" if option.batch else ""
    said = WHERE[option.said].format(option.slurm)
    key = option.key.replace("_", "-")
    cells = (flags, f"`{key}`", variable, option.help + mark, said)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def text() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, table().values()))


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(
            0 if FILE.read_text(encoding="utf-8") == text() else "OPTIONS.md: run ci/reference.py"
        )
    FILE.write_text(text(), encoding="utf-8")
