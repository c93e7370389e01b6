"""A user's mistake is answered by `hocket` with one message that says what to change, and exit status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hocket.cli.main import main
from hocket.installing import how_to_install
from hocket.launch.mpiexec import find_mpiexec

HOCKET = [sys.executable, "-c", "from hocket.cli.main import main; main()"]
HOCKET_SCRIPT = Path(sys.executable).with_name("hocket")

BROKEN_TASK = """
from dataclasses import dataclass
from hocket.task import Digits

@dataclass(frozen=True)
class Broken(Digits):
    def model(self):
        return undefined_name
"""


def hocket(*args: str, cwd: Path, command: list[str] = HOCKET) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [*command, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def refused(*args: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> str:
    """Run `hocket` in this process, check that it refuses, and return the one message."""
    monkeypatch.setattr(sys, "argv", ["hocket", *args])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capfd.readouterr()
    assert ended.value.code == 2
    # What is started may have been said, and nothing else.
    assert all(line.startswith("starting ") for line in shown.out.splitlines()), shown.out
    [message] = shown.err.splitlines()
    assert message.startswith("hocket: ")
    return message.removeprefix("hocket: ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["sgd", "epoch=3"], "override 'epoch=3': epoch: unknown key. Did you mean 'epochs'? Allowed: name, ..."),
        (["sgd", "epochs=many"], "override 'epochs=many': epochs: got 'many'; allowed: an integer"),
        (["agd", "gradients.0.overlap=forward"], "override 'gradients.0.overlap=forward': ... use none or backward"),
        (["sdg"], "there is no recipe 'sdg'. Did you mean 'sgd' or 'sgp'? There are: ..."),
        (["negative.yaml"], "negative.yaml: ranks: ranks must be 1 or more, not -1"),
        (["sgd", "ranks=0"], "override 'ranks=0': ranks: ranks must be 1 or more, not 0"),
        (
            ["sgd", "num_workers=1000000"],
            "override 'num_workers=1000000': num_workers: num_workers must be at most 1024, not 1000000",
        ),
        (["broken.yaml"], "broken.yaml: line 2, column 2: not valid YAML: ..."),
        (["sgd", "delays=0.3"], "override 'delays=0.3': delays: got 0.3; allowed: ... with its name and fields"),
        (["late.yaml"], "late.yaml: delays.file: file late.csv, line 2: got '0;0;0.5'; ... from 0, and seconds"),
        (["absent.yaml"], "absent.yaml: cannot read the file: No such file or directory"),
        (["sgd", "steps"], "override 'steps': not of the form KEY=VALUE, such as gradients.0.overlap=backward"),
        (["sgd", "epochs=[1"], "override 'epochs=[1': line 1, column 3: not valid YAML: ..."),
        (["sgd", "transport=gloo"], "override 'transport=gloo': transport: ... one of mpi, torch, virtual or null"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_in_a_file_or_an_override(
    args: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "negative.yaml").write_text("recipe: sgd\nranks: -1\n")
    (tmp_path / "late.yaml").write_text("recipe: sgd\ndelays: {name: file, file: late.csv}\n")
    (tmp_path / "late.csv").write_text("rank,step,seconds\n0;0;0.5\n")
    (tmp_path / "broken.yaml").write_text("a: [1, 2\nb: 3\n")
    beginning, _, ending = expected.partition("...")
    message = refused("run", *args, monkeypatch=monkeypatch, capfd=capfd)
    assert message.startswith(beginning)
    assert message.endswith(ending.strip() if ending.strip() else message)
    if not ending and "..." not in expected:
        assert message == expected


WITHOUT_TORCH = """
import sys
from hocket.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_a_mistake_is_found_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    ended = hocket("run", "sgd", "epoch=3", cwd=tmp_path, command=command)
    assert (ended.returncode, ended.stdout) == (2, "")
    [message] = ended.stderr.splitlines()
    assert message.startswith("hocket: override 'epoch=3': epoch: unknown key. ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["recipe=crossover"], "no effect after recipe sgd: write crossover instead of sgd"),
        (["strategy=agd"], "To use a recipe, name it first, as in `hocket run agd`, or write recipe: agd in a file"),
        (["strategy=sgd,agd"], "only a sweep takes strategy=. To run each of several values: "
         "`hocket sweep sgd strategy=sgd,agd`"),
        (["seed=0,1,2"], "allowed: an integer. To run each of several values: `hocket sweep sgd seed=0,1,2`"),
        (["task=digits,digit", "epochs=2"], "`hocket sweep sgd task=digits,digit epochs=2`"),
        (["optimizer.lr=0.1,0.2"], "`hocket sweep sgd optimizer.lr=0.1,0.2`"),
        (["timeout_s=soon"], "timeout_s: got 'soon'; allowed: a number, or a number with s, ms or us, such as 200ms"),
        (["task=fashion_mnist"], ":MyTask. hocket-tasks has more, but is not installed: "
         + how_to_install("hocket-tasks")),
        (["task=my_task"], "there is no task 'my_task'. There are: digits. One of your own is "
         "module:attribute, such as my_task:MyTask"),
        (["task=my.task.py"], "One of your own is module:attribute, such as my.task:MyTask"),
        (["delays={name: fixed, ranks: [2], seconds: 1}"], "delays do not fit 2 ranks: ranks is [2]; allowed: ranks"),
        (["delays={name: random_subset, count: 3, seconds: 1}"], "delays do not fit 2 ranks: count is 3; allowed: 0"),
        (["task=digit"], "override 'task=digit': task: there is no task 'digit'. Did you mean 'digits'? There"),
        (["optimizer=adamm"], "override 'optimizer=adamm': optimizer: there is no optimizer 'adamm'. Did you mean 'ad"),
        (["optimizer.lrr=1"], "override 'optimizer.lrr=1': optimizer.lrr: unknown argument of sgd. Did you mean 'lr'"),
        (["optimizer.lr=-1"], "optimizer: sgd refuses lr: -1, momentum: 0.9: Invalid learning rate: -1"),
        (["engine=pipeline"], "override 'engine=pipeline': engine: there is no engine 'pipeline'. There are: data_par"),
        (["--out", "FILE/folder"], "--out FILE/folder cannot be written, because FILE is no folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_found_before_ranks_are_started(
    args: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    message = refused("run", "sgd", "-n", "2", *args, monkeypatch=monkeypatch, capfd=capfd)
    assert expected in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["run", "sgd", "-n", "0"],
         "Error: Invalid value for '-n' / '-np' / '--np': 0 is not in the range 1<=x<=65536."),
        (["run", "sgd", "-n", "two"], "Error: Invalid value for '-n' / '-np' / '--np': 'two' is not a valid integer"),
        (["run", "sgd", "--transport", "carrier_pigeon"], "Error: Invalid value for '--transport': 'carrier"),
        (["run", "sgd", "--out", "FILE"], "Error: Invalid value for '--out': Directory 'FILE' is a file."),
        (["run"], "Error: Missing argument 'RECIPE|FILE.yaml'."),
        (["rnu", "sgd"], "Error: No such command 'rnu'."),
        (["plan", "sgd", "-n", "-4"],
         "Error: Invalid value for '-n' / '-np' / '--np': -4 is not in the range 1<=x<=65536."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mistake_in_the_command_itself(
    args: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["hocket", *args])
    with pytest.raises(SystemExit, match="2"):
        main()
    said = capfd.readouterr().err
    assert said.startswith("Usage: ")
    [error] = [line for line in said.splitlines() if line.startswith("Error: ")]
    assert error.startswith(expected)


def test_plan_answers_as_run_does(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for args in (["sdg"], ["sgd", "epoch=3"]):
        planned, run = (
            refused(command, *args, monkeypatch=monkeypatch, capfd=capfd) for command in ("plan", "run")
        )
        assert planned == run


@pytest.mark.skipif(not HOCKET_SCRIPT.exists(), reason="the script hocket is not installed beside Python")
def test_the_installed_script_answers_too(tmp_path: Path) -> None:
    ended = hocket("run", "sdg", cwd=tmp_path, command=[str(HOCKET_SCRIPT)])
    assert (ended.returncode, ended.stderr.startswith("hocket: there is no recipe 'sdg'")) == (2, True)


def test_a_bug_in_the_users_model_shows_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(BROKEN_TASK)
    ended = hocket("run", "sgd", "task=my_task:Broken", cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert f'File "{tmp_path}/my_task.py", line 8, in model' in ended.stderr
    assert ended.stderr.rstrip().endswith("NameError: name 'undefined_name' is not defined")


def test_plan_shows_a_bug_once_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_task.py").write_text(BROKEN_TASK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["hocket", "plan", "sgd", "task=my_broken_task:Broken"])
    with pytest.raises(NameError, match="undefined_name") as caught:
        main()
    assert caught.value.__context__ is None


@pytest.mark.mpi
@pytest.mark.skipif(find_spec("mpi4py") is None, reason="mpi4py is not installed")
class TestUnderALauncher:
    @pytest.mark.usefixtures("with_muon")
    def test_what_only_the_ranks_find_is_told_once(self, tmp_path: Path) -> None:
        # Muon takes no bias, which is known when there is a model.
        ended = hocket("run", "sgd", "-n", "2", "optimizer=muon", "optimizer.lr=0.1", cwd=tmp_path)
        assert ended.returncode == 2
        [message] = ended.stderr.strip("\0\n").splitlines()
        # One rank speaks for all where both had time to find it.
        assert message.startswith(("hocket: rank ", "hocket: all ranks "))
        assert "optimizer: muon takes only matrices: add rest: " in message

    def test_a_number_of_ranks_that_the_launcher_did_not_start(self, tmp_path: Path) -> None:
        command = find_mpiexec().command(2, HOCKET, folder=tmp_path)
        ended = hocket("run", "sgd", "-n", "3", cwd=tmp_path, command=command)
        assert ended.returncode == 2
        # Both ranks find it out, and a busy machine lets the second one say so before the job ends.
        messages = [line for line in ended.stderr.splitlines() if line.startswith("hocket:")]
        for message in messages:
            assert message.endswith("mpiexec started 2 ranks, but you asked for 3: leave out -n and `ranks`")
        assert messages
        assert "Traceback" not in ended.stderr

    @pytest.mark.full
    def test_no_bar_is_drawn_into_what_may_be_a_file(self, tmp_path: Path) -> None:
        command = find_mpiexec().command(2, HOCKET, folder=tmp_path)
        ended = hocket("run", "sgd", "steps=4", "log_every=2", cwd=tmp_path, command=command)
        assert ended.returncode == 0
        assert "\x1b" not in ended.stdout + ended.stderr
        assert "epoch 1  step 4/4" in ended.stdout

    def test_a_transport_that_the_launcher_does_not_start(self, tmp_path: Path) -> None:
        command = find_mpiexec().command(2, HOCKET, folder=tmp_path)
        ended = hocket("run", "sgd", "--transport", "virtual", cwd=tmp_path, command=command)
        assert ended.returncode == 2
        messages = {line for line in ended.stderr.splitlines() if line.startswith("hocket:")}
        [message] = messages  # of one rank, or of both, as above
        assert message.endswith(
            "starts ranks for transport mpi, not virtual: start without this launcher, or do not name a transport"
        )


def test_mistakes_are_told_in_a_process_in_which_another_library_listens_for_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", print)  # as torch.distributed does
    monkeypatch.setattr(sys, "argv", ["hocket", "plan", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.startswith("hocket: ")
