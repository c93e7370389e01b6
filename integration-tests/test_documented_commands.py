"""The commands of READMEs and docs: `hocket` commands begin; `tools/test --full` lets each come to its end.

Lines of a fenced block, or indented by four, that begin with `hocket`. Each has a folder of its own, with the files
that its page speaks of.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hocket.cli.main import cli
from hocket.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("packages/*/README.md"))]
#: By page and line.
COMMANDS = {
    f"{page.relative_to(ROOT)}:{number}": re.sub(r"\s{2,}#.*", "", found[1])
    for page in PAGES
    for number, line in enumerate(page.read_text().splitlines(), start=1)
    if (found := re.match(r"(?: {4})?(hocket (?:[a-z]+ .*|plugins|doctor|bench)\b.*)", line))
}
#: What a command goes on from, by what it contains.
BEFORE = {
    "resume out": "hocket run dpsgd -n 2 epochs=1 checkpoint.every=5 --out out",
    "compare runs": "hocket run sgd -n 2 epochs=1 --out runs/sgd",
    "recommend runs/mine": "hocket run sgd -n 2 epochs=1 --out runs/mine",
}
#: What cannot be carried out here, by what it contains.
ELSEWHERE = {
    "--hosts a:": "hosts a and b, by ssh",
    "--hosts hostfile": "hosts, by ssh",
    "-m my_package": "a package of the reader's",
    "hocket run mine": "the plugin is made by the line before; test_new.py trains with it",
}
JOINS = "import hocket\nwith hocket.join() as peer:\n    print(peer.rank, peer.size)\n"


def prepare(place: str, folder: Path) -> None:
    """Write the files that a page's commands are about."""
    blocks = re.findall(
        r"^```python[^\n]*\n(.*?)^```", (ROOT / place.partition(":")[0]).read_text(), re.M | re.S
    )
    scripts = [block for block in blocks if "hocket.attach(" in block and "sys.argv" in block]
    (folder / "train.py").write_text(scripts[0] if scripts and "agd" in COMMANDS[place] else JOINS)
    for block in blocks:
        if named := re.match(r"# ([a-z_0-9]+\.py)\b", block):
            (folder / named[1]).write_text(block)
    (folder / "my_run.yaml").write_text("recipe: sgd\nepochs: 1\n")


def skip_elsewhere(command: str) -> None:
    for part, reason in ELSEWHERE.items():
        if part in command:
            pytest.skip(f"needs {reason}")


@pytest.mark.parametrize(
    "place",
    [place for place, command in COMMANDS.items() if command.startswith(("hocket run ", "hocket plan "))],
)
def test_it_can_be_started(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS[place]
    skip_elsewhere(command)
    prepare(place, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = shlex.split(command)[1:]
    done = CliRunner().invoke(cli, [*words, "--dry-run"] if words[0] == "run" else words)
    for script in tmp_path.glob("*.py"):
        sys.modules.pop(script.stem, None)
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", COMMANDS)
def test_it_comes_to_its_end(place: str, tmp_path: Path) -> None:
    command = COMMANDS[place]
    skip_elsewhere(command)
    prepare(place, tmp_path)
    before = [first for part, first in BEFORE.items() if part in command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for each in [*before, command]:
        done = subprocess.run(
            each,
            shell=True,
            cwd=tmp_path,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
        )
        if "`apt install" in done.stderr:
            raise UserError(done.stderr)
        assert done.returncode == 0, f"{each}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
