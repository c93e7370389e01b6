"""Processes that a rank starts for itself."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs import ended

SCRIPT = """
import os, pathlib, subprocess, sys
import hocket

peer = hocket.join()
helper = [sys.executable, "-c", "import hocket; hocket.compose('agdd')"]
done = subprocess.run(helper, check=False, capture_output=True, text=True)
noted = [path.name for path in pathlib.Path(os.environ["HOCKET_PID_FOLDER"]).iterdir()]
print(f"rank {peer.rank} goes on after {done.returncode}, {'ending' in noted}", flush=True)
peer.close()
"""


def test_a_helper_that_fails_ends_no_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "hocket", "launch", "-n", "2", "--transport", "torch", "train.py"]
    job = ended(launch, tmp_path)
    assert (job.returncode, job.stderr) == (0, "")
    assert sorted(job.stdout.splitlines()) == [
        "rank 0 goes on after 1, False",
        "rank 1 goes on after 1, False",
    ]
