"""The script of README.md on ranks that any launcher has started: `readme.py OUT`, where each leaves its weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "session"))

import readme_script

import hocket
from hocket.training.startup import defer_dynamo

#: Samples, samples in a global batch, and the strategy.
SETTINGS = (48, 12, ["agd", "gradients.0.segments=layers"])

if __name__ == "__main__":
    defer_dynamo()
    peer = hocket.join()
    told = readme_script.run(peer, *SETTINGS)
    told = {"transport": peer.transport, "size": peer.size, "parameters": told["parameters"]}
    (Path(sys.argv[1]) / f"{peer.rank}.json").write_text(json.dumps(told))
