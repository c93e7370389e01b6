"""Processes that are killed at drawn moments while they save beside training: each goes on from a complete one.

By hand, with other seeds and more of them: `python killed_job.py FOLDER SEED COUNT`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

JOB = Path(__file__).with_name("killed_job.py")


def test_some_kills(tmp_path: Path) -> None:
    kills = 12 if os.environ.get("HOCKET_CELLS") == "all" else 5
    job = [sys.executable, str(JOB), str(tmp_path / "runs"), "1", str(kills)]
    ended = subprocess.run(job, check=False, text=True, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found["steps"]) == kills
    assert max(found["steps"]) > 1
