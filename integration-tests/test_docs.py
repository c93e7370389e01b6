"""The blocks of READMEs and docs: Python blocks parse, YAML blocks are accepted, and those marked `python run` run.

`python run by torchrun` is a script of torch's own, without Hocket. `tools/test --full` runs the other Python blocks,
too, with names that a reader has: a model, an optimizer, a loss, data.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf

import hocket
from hocket.cli.main import cli
from hocket.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]


def blocks(language: str) -> dict[str, tuple[str, str]]:
    """Return the marks and texts of all blocks of a language, by page and number."""
    return {
        f"{page.relative_to(ROOT)} {number}": (mark, textwrap.dedent(text))
        for page in PAGES
        for number, (mark, text) in enumerate(
            re.findall(
                rf"^ *```{language}( run(?: by torchrun)?)?\n(.*?)^ *```", page.read_text(), re.M | re.S
            )
        )
    }


PYTHON = blocks("python")
YAML = blocks("yaml")
#: What a reader of a block has, who trains a model already.
READERS = """\
import hocket
import torch
from torch import nn

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(256, 8), torch.randint(3, (256,)))
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)), nn.Linear(8, 3))
loss = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
epochs = 1


def evaluate(model):
    with torch.no_grad():
        return loss(model(dataset.tensors[0]), dataset.tensors[1])


"""


@pytest.mark.parametrize("block", PYTHON)
def test_it_parses(block: str) -> None:
    ast.parse(PYTHON[block][1])


def run(script: Path, *starter: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *starter]
    return subprocess.run(
        command, cwd=script.parent, capture_output=True, text=True, timeout=120, check=False
    )


MARKED = [name for name, (mark, _) in PYTHON.items() if mark]


@pytest.mark.parametrize("block", [name for name in MARKED if "torchrun" not in PYTHON[name][0]])
def test_it_runs(block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On virtual ranks, or on one where the block starts ranks itself."""
    text = PYTHON[block][1]
    monkeypatch.setattr(sys, "argv", ["train.py", "agd"])
    script = compile(text, "train.py", "exec")
    if "hocket.virtual(" in text:
        exec(script, {"__name__": "__main__"})
    else:
        hocket.virtual(2).run(lambda: exec(script, {"__name__": "__main__"}))
    assert "agd" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("block", MARKED)
def test_it_runs_under_a_launcher(block: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    mark, text = PYTHON[block]
    script.write_text(text)
    if mark.endswith("torchrun"):
        done = run(script, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
        # On a busy machine torch aborts at its exit, now and then: a thread of its process group is still there.
        aborted = "terminate called without an active exception" in done.stderr
        assert done.returncode == 0 or aborted, done.stderr
        assert "DDP: loss" in done.stdout
    else:
        done = run(script, "hocket", "launch", "-n", "2", str(script), "agd")
        assert done.returncode == 0, done.stderr
        assert "agd" in done.stdout


# Blocks that begin with a file's name are those of commands: test_documented_commands.py.
@pytest.mark.full
@pytest.mark.parametrize(
    "block", [name for name, (mark, text) in PYTHON.items() if not mark and not re.match(r"# \w+\.py", text)]
)
def test_it_runs_in_a_readers_script(block: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(READERS + PYTHON[block][1])
    done = run(script, "hocket", "launch", "-n", "4", str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", YAML)
def test_a_run_accepts_it(block: str, tmp_path: Path) -> None:
    """Blocks that are a strategy's part, an exchange's or a run's own are put where they belong."""
    given: Any = OmegaConf.create(YAML[block][1])
    if "compressor" in given:
        given = {"gradients": [{"collective": "sparse_allreduce", **given}]}
    if given.keys() <= {"gradients", "parameters"}:
        given = {"strategy": given}
    if not given.keys() & {"recipe", "strategy"}:
        given = {"recipe": "local" if "engine" in given else "sgd", **given}
    file = tmp_path / "mine.yaml"
    OmegaConf.save(given, file)
    done = CliRunner().invoke(cli, ["run", str(file), "-n", "4", "--dry-run"])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
