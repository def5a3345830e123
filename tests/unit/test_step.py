"""What ``toolkit run`` does with what srun prints, where there are many ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from toolkit.entrypoint.finish import write_json

if TYPE_CHECKING:
    from pathlib import Path

# A process of its own, whose limit is lowered.
LISTEN = """
import io, sys
from pathlib import Path
from toolkit.run_dir import RunDir
from toolkit.targets.step import _Listener

class Silent:
    def line(self, who, text): pass
    def note(self, text): pass

listener = _Listener(RunDir(Path(sys.argv[1])), Silent())
lines = [f"{rank:04}: {word}\\n".encode() for word in ("a", "b") for rank in range(600)]
listener.read(io.BytesIO(b"".join(lines)))
listener.close()
"""


@pytest.mark.parametrize("limits", ["ulimit -Sn 256", "ulimit -Sn 256; ulimit -Hn 256"])
def test_more_ranks_than_files_may_be_open(tmp_path: Path, limits: str) -> None:
    (tmp_path / "logs").mkdir()
    write_json(str(tmp_path / "run.json"), {"world_size": 600, "num_nodes": 75})
    command = ["sh", "-c", f'{limits}; exec "$@"', "sh", sys.executable, "-c", LISTEN]
    ran = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    logs = sorted(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert logs == ["a\nb\n"] * 600
