"""Launchers' paragraphs about failed ranks are read and left out; everything else comes through, whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.launch.job_output import JobOutput, Report

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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            OPENMPI_KILLED,
            "rank 2 on vm was killed by SIGKILL (out of memory? see the kernel's log); all ranks were ended",
        ),
        (OPENMPI_KILLED.replace("signal 9", "signal 11"), "rank 2 on vm was killed by SIGSEGV; all ranks were ended"),
        (OPENMPI_LEFT, "rank 1 ended with exit code 4; all ranks were ended"),
        (OPENMPI_ABORTED, ""),
    ],
)  # fmt: skip
def test_open_mpi(text: str, cause: str, tmp_path: Path) -> None:
    for step in (1, 7, 4096):
        assert filtered(f"before\n{text}after\n", tmp_path, step=step) == ("before\nafter\n", cause)


def test_mpich_may_name_a_rank_that_it_has_killed_itself(tmp_path: Path) -> None:
    (tmp_path / "77").write_text("3")
    rest, cause = filtered(MPICH_KILLED.replace("CODE: CODE", "CODE: 9"), tmp_path, "=")
    assert rest.strip() == ""
    assert cause == (
        "a rank on vm (possibly rank 3) was killed by SIGKILL (out of memory?), or ended without a message; "
        "all ranks were ended"
    )
    rest, cause = filtered(MPICH_KILLED.replace("CODE: CODE", "CODE: 11"), tmp_path, "=")
    assert (rest.strip(), cause) == ("", "rank 3 on vm was killed by SIGSEGV; all ranks were ended")


def test_the_first_cause_counts(tmp_path: Path) -> None:
    _, cause = filtered(OPENMPI_LEFT + OPENMPI_KILLED, tmp_path)
    assert cause.startswith("rank 1 ended")


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


LOG = "[vm:7] [prterun-vm-7@0,0] "
ULFM_KILLED = f"""{LOG}odls:launch working child [prterun-vm-7@1,1]
{LOG}odls:waitpid_fired child process [prterun-vm-7@1,1] terminated with signal Killed
NBC_Progress: an error 75 was found during schedule 0x5564769412b0 at row-offset 0 - aborting the schedule

hocket: at step 3, rank 0: gradients.0[0] (allreduce): rank 1 has died; all ranks end
{LOG}errmgr:dvm: proc [prterun-vm-7@1,0] called abort with exit code 1
{LOG}errmgr:dvm: proc [prterun-vm-7@1,0] exited with non-zero status 1
{LOG}odls:waitpid_fired child process [prterun-vm-7@1,2] terminated with signal Terminated
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
        "(out of memory? see the kernel's log); all ranks were ended"
    )
    assert (report.status, ended) == (128 + 9, [])


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
    text = f"mine\n{LOG}errmgr:dvm: proc [prterun-vm-7@1,2] exited with non-zero status 4\n[vm:7] mine, too\n"
    through, report, ended = heard(text, tmp_path)
    assert through == "mine\n[vm:7] mine, too\n"
    assert report.message == "rank 2 ended with exit code 4; all ranks were ended"
    assert (report.status, ended) == (4, ["ended"])


def test_who_is_ended_by_an_abort_is_no_cause(tmp_path: Path) -> None:
    text = f"hocket: rank 1 at step 3: broken; all ranks end\n{ULFM_KILLED.partition('all ranks end')[2].strip()}\n"
    through, report, ended = heard(text, tmp_path)
    assert through == "hocket: rank 1 at step 3: broken; all ranks end\n"
    assert (report.message, report.status, ended) == ("", 1, [])
