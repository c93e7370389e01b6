"""`torch._dynamo` is imported when something is compiled, and not before; what is started is said at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from hocket.training.startup import defer_dynamo
defer_dynamo()
import inspect, torch
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

def step():
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scheduler.step()

step()
optimizer.load_state_dict(optimizer.state_dict())
inspect.getmodule(inspect.currentframe())
assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]

{use}

import torch._dynamo
assert torch._dynamo is sys.modules["torch._dynamo"]
assert torch._dynamo.__file__
assert torch._dynamo.config is sys.modules["torch._dynamo.config"]
step()
assert torch._dynamo.is_compiling() is False
"""


def check(use: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(use=use)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_what_is_compiled_after_steps_is_compiled() -> None:
    check(
        """
compiled = torch.compile(lambda x: torch.sin(x) + 1, backend="eager", fullgraph=True)
assert torch.equal(compiled(torch.ones(2)), torch.sin(torch.ones(2)) + 1)
"""
    )


def test_a_submodule_can_be_imported_first() -> None:
    check("import torch._dynamo.config")


def test_a_run_says_what_it_starts_and_imports_no_dynamo(tmp_path: Path) -> None:
    script = """
import sys
from hocket.cli.main import main
try:
    main()
finally:
    assert not [name for name in sys.modules if name.startswith("torch._dynamo.")]
"""
    command = [sys.executable, "-c", script, "run", "sgd", "steps=2", "--out", "results"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    first = ended.stdout.splitlines()[0]
    assert re.fullmatch(
        r"starting sgd: task digits, one rank, on (cpu|cuda), (1 thread|up to \d+ threads), results in results",
        first,
    )
