"""Run the test tiers and say of each whether it ran: ``python ci/tiers.py [all|TIER]``.

A tier that did not run is not a pass: the summary names every skipped tier and the reason. Each
tier but ``unit`` has ``tests/TIER/conftest.py``, which starts what the tier needs through
``ci/testbed`` and skips, with the reason, where that cannot be had.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

TIERS = ("unit", "slurm", "docker", "pyxis")
NO_TESTS_COLLECTED = 5


def run(tier: str) -> tuple[int, str]:
    """Run one tier; return its exit code and a line for the summary."""
    if not any(Path("tests", tier).glob("test_*.py")):
        return 0, "SKIPPED: has no tests yet"
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        code = subprocess.run(
            [sys.executable, "-m", "pytest", f"tests/{tier}", f"--junit-xml={report}"], check=False
        ).returncode
        if not report.exists():
            return code or 1, "FAILED before any test ran"
        suite = ET.parse(report).getroot()[0]
    count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
    ran = count["tests"] - count["skipped"]
    reasons = sorted({node.get("message", "") for node in suite.iter("skipped")})
    if code not in {0, NO_TESTS_COLLECTED}:
        return code, f"FAILED: {count['failures'] + count['errors']} of {ran}"
    if ran == 0:
        return 0, f"SKIPPED: {'; '.join(reasons)}"
    skipped = f", {count['skipped']} skipped: {'; '.join(reasons)}" if count["skipped"] else ""
    return 0, f"passed: {ran} tests{skipped}"


def main(which: str) -> int:
    """Run ``which`` (a tier or ``all``); the exit code is non-zero where any tier failed."""
    if which != "all" and which not in TIERS:
        print(f"unknown tier {which!r}: choose all, {', '.join(TIERS)}", file=sys.stderr)
        return 2
    results = {tier: run(tier) for tier in (TIERS if which == "all" else (which,))}
    print("\ntiers:")
    for tier, (_, line) in results.items():
        print(f"  {tier:7} {line}")
    return max(code for code, _ in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "all"))
