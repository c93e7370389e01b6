"""Runs that save beside training and are killed at drawn moments. `python killed_job.py FOLDER SEED COUNT`.

Each is a fork of this process, which has imported everything and computes nothing. Every run is continued by another
fork, and has to end with the bits of one that nobody has killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from training import Training, on_ranks

from hocket.checkpoint.folder import complete, incomplete
from hocket.checkpoint.manifest import Manifest
from hocket.training.startup import defer_dynamo

TRAINING = Training(("dpsgd",), epochs=4, options={"keep": 2, "blocking": False})
SAVED = range(1, 100, 2)
#: The last step that is saved.
LAST = 19


def digest_of(folder: Path | None, load: Path | None = None) -> str:
    save = None if folder is None else (folder, SAVED)
    bits = [result.bits() for result in on_ranks(2, TRAINING, save=save, load=load)]
    return hashlib.sha256(repr(bits).encode()).hexdigest()


def forked(run: Callable[[], str], told: Path) -> int:
    """Begin `run` in a process of its own, which writes what it returns; return its number."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    told.write_text(run())
    os._exit(0)


def ended(child: int) -> bool:
    return os.waitpid(child, 0)[1] == 0


def main(folder: Path, seed: int, count: int) -> None:
    defer_dynamo()
    folder.mkdir()
    assert ended(forked(lambda: digest_of(None), folder / "expected"))
    expected = (folder / "expected").read_text()
    begun_s = time.monotonic()
    assert ended(forked(lambda: digest_of(folder / "whole"), folder / "told"))
    whole_s = time.monotonic() - begun_s
    draws = random.Random(seed)
    found: list[int] = []
    num_cut_off = 0
    for number in range(count):
        own = folder / str(number)
        child = forked(lambda own=own: digest_of(own), folder / "told")  # type: ignore[misc]
        time.sleep(draws.uniform(0.1, 1.0) * whole_s)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        num_cut_off += bool(incomplete(own))
        steps = [Manifest.read(path).step for path in complete(own)]
        found.append(max(steps, default=0))
        load = own if steps else None
        assert ended(forked(lambda own=own, load=load: digest_of(own, load), folder / "told")), number  # type: ignore[misc]
        assert (folder / "told").read_text() == expected, number
        assert max(steps, default=0) >= LAST or not incomplete(own)  # a later save has removed it
    print(json.dumps({"steps": found, "cut_off": num_cut_off}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
