"""A rank on hosts that share no disk. `python own_disk_rank.py FOLDER (begin | go-on)`, under torchrun's variables.

It saves into its host's folder beside training, and prints a digest of what it has learnt.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from training import Training

from hocket.training.startup import defer_dynamo

TRAINING = Training(("dpsgd",), epochs=4, options={"keep": 2, "blocking": False})


def digest_of(bits: object) -> str:
    return hashlib.sha256(repr(bits).encode()).hexdigest()


if __name__ == "__main__":
    defer_dynamo()
    folder = Path(sys.argv[1])
    load = folder if sys.argv[2] == "go-on" else None
    result = TRAINING(int(os.environ["RANK"]), save=(folder, range(1, 100, 2)), load=load)
    print(digest_of(result.bits()))
