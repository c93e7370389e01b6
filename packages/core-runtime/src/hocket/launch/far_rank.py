"""A rank on another host, as its starter's ssh begins it: `python -m hocket.launch.far_rank FOLDER PROGRAM...`.

Signals for the rank come as numbers, a line each, on standard input. Its end is the starter's end, or the connection's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

from hocket.launch.rank_process import end_with_parent

# Seconds that the rank may take to end by itself.
_ENDING_TIMEOUT_S = 3.0


def _main(folder: str, program: Sequence[str]) -> int:
    """Run a program in a folder, and return its exit status as shells do."""
    os.chdir(folder)
    rank = subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 (it takes no lock)
    )
    threading.Thread(target=_pass_on, args=(rank,), daemon=True).start()
    status = rank.wait()
    return status if status >= 0 else 128 - status


def _pass_on(rank: subprocess.Popen[bytes]) -> None:
    """Send a rank the signals that are asked for, and end it when nobody can ask any more."""
    for line in sys.stdin:
        rank.send_signal(int(line))
    rank.terminate()
    time.sleep(_ENDING_TIMEOUT_S)
    rank.kill()


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], sys.argv[2:]))
