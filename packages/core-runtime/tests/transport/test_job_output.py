"""Launchers' paragraphs on failed ranks are left out, a rank's line on its end is the cause, the rest comes through."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.transport.job_output import JobOutput, Report, telling

DASHES, EQUALS = "-" * 74, "=" * 83

OPENMPI_KILLED = f"""{DASHES}
prterun noticed that process rank 2 with PID 3056 on node vm exited on
signal 9 (Killed).
{DASHES}
"""
OPENMPI_LEFT = f"""{DASHES}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-3058@1,1]
   Exit code:    4
{DASHES}
"""
OPENMPI_ABORTED = f"""{DASHES}
MPI_ABORT was invoked on rank 0 in communicator MPI_COMM_WORLD
  Proc: [[48506,1],0]
  Errorcode: 2
{DASHES}
{DASHES}
prterun has exited due to process rank 0 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{DASHES}
"""
MPICH_KILLED = f"""
{EQUALS}
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 77 RUNNING AT vm
=   EXIT CODE: CODE
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
{EQUALS}
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
This typically refers to a problem with your application.
Please see the FAQ page for debugging suggestions
"""


def filtered(text: str, folder: Path, rule: str = "-", step: int = 7) -> tuple[str, str]:
    """Return what comes through of `text`, given `step` bytes at a time, and the cause that was found."""
    report = Report(folder, 3)
    out: list[str] = []
    output = JobOutput(report, rule, out.append)
    data = text.encode()
    for start in range(0, len(data), step):
        output.feed(data[start : start + step])
    output.close()
    return "".join(out), report.cause


@pytest.mark.parametrize("text", [OPENMPI_KILLED, OPENMPI_LEFT, OPENMPI_ABORTED])
def test_open_mpis_paragraphs_are_left_out(text: str, tmp_path: Path) -> None:
    for step in (1, 7, 4096):
        assert filtered(f"before\n{text}after\n", tmp_path, step=step) == ("before\nafter\n", "")


def test_mpichs_paragraph_is_left_out(tmp_path: Path) -> None:
    rest, cause = filtered(MPICH_KILLED, tmp_path, "=")
    assert (rest.strip(), cause) == ("", "")


def test_paragraphs_that_are_left_out_are_kept_for_a_job_whose_ranks_have_said_nothing(
    tmp_path: Path,
) -> None:
    report = Report(tmp_path, 3)
    JobOutput(report, "-", lambda text: None).feed(f"before\n{OPENMPI_LEFT}{OPENMPI_KILLED}".encode())
    assert report.launchers == OPENMPI_LEFT + OPENMPI_KILLED


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (4, "rank 2 ended with exit code 4"),
        (255, "rank 2 ended with exit code 255"),
        (137, "rank 2 on vm was killed by SIGKILL (out of memory? the kernel's log would tell)"),
        (139, "rank 2 on vm was killed by SIGSEGV"),
    ],
)
def test_a_ranks_line_on_its_end_is_the_cause(status: int, cause: str, tmp_path: Path) -> None:
    line = f"hocket: rank 2 on vm ended with status {status}\n"
    for before, step in (("", 1), ("a line\n", 7), ("30 %", 4096)):  # a progress bar has no end
        through, found = filtered(f"{before}{line}", tmp_path, step=step)
        assert (through.rstrip("\n"), found) == (before.rstrip("\n"), f"{cause}; all ranks were ended")


@pytest.mark.parametrize(
    ("program", "status"),
    [("exit 0", 0), ("exit 3", 3), ("exit 200", 200), ("kill -9 $$", -9), ("kill -TERM $$", -15)],
)
def test_a_ranks_parent_says_how_it_has_ended_and_ends_alike(program: str, status: int) -> None:
    ended = subprocess.run(
        telling(["sh", "-c", f"echo mine >&2; {program}"]),
        env={"PATH": os.defpath, "PMI_RANK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    words = status if status >= 0 else 128 - status
    line = f"hocket: rank 1 on {os.uname().nodename} ended with status {words}\n" if status else ""
    assert (ended.returncode, ended.stderr) == (status, f"mine\n{line}")


def test_a_rank_that_the_launcher_ends_has_nothing_to_say() -> None:
    rank = subprocess.Popen(
        telling(["sh", "-c", "echo begun; exec sleep 60"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "begun\n"
    os.killpg(rank.pid, signal.SIGTERM)
    assert rank.communicate(timeout=30) == ("", "")
    assert rank.returncode == -signal.SIGTERM


def test_the_first_cause_counts(tmp_path: Path) -> None:
    lines = "".join(f"hocket: rank {rank} on vm ended with status {rank + 3}\n" for rank in (1, 0))
    assert filtered(lines, tmp_path)[1].startswith("rank 1 ended with exit code 4")


def test_other_paragraphs_come_through(tmp_path: Path) -> None:
    warning = f"{DASHES}\nThere is no InfiniBand here.\n{DASHES}\n"
    assert filtered(warning, tmp_path) == (warning, "")
    table = f"{DASHES}\n" + "a line of the user's table\n" * 100
    assert filtered(table, tmp_path) == (table, "")


def test_a_line_that_has_not_ended_comes_through_at_once(tmp_path: Path) -> None:
    out: list[str] = []
    output = JobOutput(Report(tmp_path, 3), "-", out.append)
    output.feed(b"step 1\rstep 2")
    assert "".join(out) == "step 1\rstep 2"
    output.feed("\rstep 3 \N{CHECK MARK}".encode()[:-1])
    output.feed("\N{CHECK MARK}".encode()[-1:] + b" done\n")
    assert "".join(out) == "step 1\rstep 2\rstep 3 \N{CHECK MARK} done\n"


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0")), st.integers(1, 9))
def test_anything_else_is_not_touched(text: str, step: int) -> None:
    assert filtered(f"x{text}", Path(), step=step) == (f"x{text}", "")


ULFM_KILLED = """hocket: rank 1 on vm ended with status 137
NBC_Progress: an error 75 was found during schedule 0x5564769412b0 at row-offset 0 - aborting the schedule

hocket: at step 3, rank 0: gradients.0[0] (allreduce): rank 1 has died; all ranks end
hocket: rank 0 on vm ended with status 1
"""


def heard(text: str, folder: Path) -> tuple[str, Report, list[str]]:
    """Return what comes through, the report, and a word for each time that the job was ended."""
    ended: list[str] = []
    report = Report(folder, 3, end=lambda: ended.append("ended"))
    out: list[str] = []
    output = JobOutput(report, "-", out.append)
    output.feed(text.encode())
    output.close()
    return "".join(out), report, ended


def test_what_survivors_say_of_a_dead_rank_is_one_sentence_with_what_it_died_of(tmp_path: Path) -> None:
    for process in range(3):
        (tmp_path / str(process)).touch()
    through, report, ended = heard(ULFM_KILLED, tmp_path)
    assert through == ""
    assert report.message == (
        "at step 3, rank 0: gradients.0[0] (allreduce): rank 1 has died; rank 1 on vm was killed by SIGKILL "
        "(out of memory? the kernel's log would tell); all ranks were ended"
    )
    assert (report.status, ended[1:]) == (128 + 9, [])


def test_a_rank_killed_before_all_have_joined_ends_the_job(tmp_path: Path) -> None:
    """Within MPI_Init nobody tells the others, who would wait for it for ever."""
    (tmp_path / "17").touch()
    _, report, ended = heard(ULFM_KILLED.split("NBC", maxsplit=1)[0], tmp_path)
    assert report.message.startswith("rank 1 on vm was killed by SIGKILL")
    assert ended == ["ended"]


def test_survivors_are_heard_where_the_launcher_says_nothing(tmp_path: Path) -> None:
    _, report, _ = heard(
        "hocket: at step 3, rank 0: a (barrier): ranks 1, 2 have died; all ranks end\n", tmp_path
    )
    assert report.message == "at step 3, rank 0: a (barrier): ranks 1, 2 have died; all ranks end"


def test_a_rank_that_leaves_the_others_waiting_ends_the_job(tmp_path: Path) -> None:
    through, report, ended = heard("mine\nhocket: rank 2 on vm ended with status 4\nmine, too\n", tmp_path)
    assert through == "mine\nmine, too\n"
    assert report.message == "rank 2 ended with exit code 4; all ranks were ended"
    assert (report.status, ended) == (4, ["ended"])


@pytest.mark.parametrize("status", [1, 130])
def test_a_rank_that_ends_the_job_has_said_why(status: int, tmp_path: Path) -> None:
    (tmp_path / "ending").write_text(str(status))
    line = "hocket: rank 1 at step 3: broken; all ranks end\n"
    through, report, _ = heard(f"{line}hocket: rank 1 on vm ended with status {status}\n", tmp_path)
    assert through == line
    assert (report.message, report.status) == ("", status)
