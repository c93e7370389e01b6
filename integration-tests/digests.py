"""Digests of what Hocket computes: weights, losses and counted bytes of every recipe and many compositions.

    python integration-tests/digests.py [--quick] [--output FILE]
    python integration-tests/digests.py [--quick] --against COMMIT
    python integration-tests/digests.py --across

With `--against` this very script runs on the sources at hand and on those of COMMIT, on this machine, and prints the
lines that differ; it exits with status 1 when any do. Bits differ between processors, so lines of another machine tell
nothing. `--quick` leaves out MPI, `hocket run` and the overlaps that recipes do not have.

With `--across` every recipe with 2 and 4 ranks and the cases of MPI run over MPI and over transport torch, and those
are printed whose bits differ: where both add in the same order none should, elsewhere losses may differ by 1e-6.

What COMMIT gives is kept in the system's temporary folder, as long as these scripts stay the same.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from pathlib import Path
from typing import Any

_Start = Callable[[int, list[str], dict[str, str]], None]

_ROOT = Path(__file__).parent.parent
_PROCESSES = 2
_TIMEOUT_S = 600
# Of losses, relative to them, where sums are in another order.
_NEAR = 1e-6
_ITSELF = [sys.executable, str(Path(__file__))]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one overlap of each recipe, no MPI")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the lines there, too")
    parser.add_argument(
        "--against", metavar="COMMIT", help="print only what differs from this commit's lines"
    )
    parser.add_argument("--across", action="store_true", help="compare transport torch with mpi")
    # For the processes that this script starts itself: a share of the virtual cases; one rank of a job.
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        return _be_rank(given.rank_of)
    if given.share is not None:
        return _print_share(given.share, given.quick)
    if given.across:
        return _compare_transports()
    lines = _lines(_ROOT, given.quick)
    if given.output is not None:
        given.output.write_text("".join(f"{line}\n" for line in lines))
    if given.against is not None:
        return _compare(_lines_of_commit(given.against, given.quick), lines)
    print("\n".join(lines))
    return int(any("CRASHED" in line for line in lines))


# ---- one side --------------------------------------------------------------------------------------------------------


def _environment(root: Path) -> dict[str, str]:
    sources = os.pathsep.join(str(path) for path in sorted(root.glob("packages/*/src")))
    return {**os.environ, "PYTHONPATH": sources, "OMP_NUM_THREADS": "1"}


def _lines(root: Path, quick: bool) -> list[str]:
    """Run all cases on a checkout's sources."""
    environment = _environment(root)
    itself = _ITSELF
    options = ["--quick"] if quick else []
    running = [
        subprocess.Popen(
            [*itself, "--share", str(share), *options], stdout=subprocess.PIPE, text=True, env=environment
        )
        for share in range(_PROCESSES)
    ]
    lines = [line for process in running for line in process.communicate()[0].splitlines()]
    for process in running:
        if process.returncode != 0:
            raise SystemExit(f"a share of the cases ended with status {process.returncode}")
    if not quick:
        from digest_cases import mpi_cases

        told_over_mpi = _of_processes(_mpiexec, mpi_cases(), environment)
        lines += [f"{name}: {_line(told)}" for name, told in told_over_mpi]
        lines += _of_command(environment)
    return sorted(lines)


def _print_share(share: int, quick: bool) -> int:
    from digest_cases import other_cases, overlap_cases, recipe_cases

    cases = [*recipe_cases(), *other_cases().items()]
    if not quick:
        cases += overlap_cases()
    for name, training in cases[share::_PROCESSES]:
        with redirect_stderr(io.StringIO()):  # notes on what a resumed run has lost, and the like
            told = _of_virtual_ranks(training)
        print(f"{name}: {told}", flush=True)
    return 0


def _of_virtual_ranks(training: Any) -> str:
    """Train on virtual ranks and return the digests, or the class of the error that refuses it."""
    from digest_cases import train

    import hocket

    try:
        if training.resumed_on is None:
            return _line(hocket.virtual(training.ranks).run(train, training))
        with tempfile.TemporaryDirectory() as folder:
            told = hocket.virtual(training.ranks).run(train, training, folder)
            return _line([*told, *hocket.virtual(training.resumed_on).run(train, training, folder, True)])
    except Exception as error:
        if type(error).__module__.startswith("hocket."):
            return f"refused {type(error).__name__}"
        traceback.print_exc(file=sys.__stderr__)
        return f"CRASHED {type(error).__name__}"


def _line(told: Iterable[Any]) -> str:
    weights, consensus, losses, counted = zip(*told, strict=True)
    return (
        f"weights={','.join(weights)} consensus={_short(consensus)} losses={_short(losses)} "
        f"bytes={','.join(f'{count:.10g}' for count in counted)}"
    )


def _short(value: object) -> str:
    """Return a digest of what is written with all its digits."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


# ---- processes -------------------------------------------------------------------------------------------------------


def _of_processes(
    start: _Start, trainings: dict[str, Any], environment: dict[str, str]
) -> Iterator[tuple[str, list[Any]]]:
    """Train over MPI or another transport of processes, in one job for each number of ranks."""
    for ranks in (2, 4):
        cases = [name for name, case in trainings.items() if case.ranks == ranks]
        with tempfile.TemporaryDirectory() as folder:
            # By name: the ranks' sources may spell a case's strategy in another way than those at hand.
            Path(folder, "cases.json").write_text(json.dumps(cases))
            start(ranks, [*_ITSELF, "--rank-of", folder], environment)
            for number, name in enumerate(cases):
                files = [Path(folder, f"{number}.{rank}.json") for rank in range(ranks)]
                yield name, [json.loads(file.read_text()) for file in files]


def _mpiexec(ranks: int, program: list[str], environment: dict[str, str]) -> None:
    mpiexec = Path(sys.executable).parent / "mpiexec"
    options = ["--oversubscribe", "--bind-to", "none", "--allow-run-as-root", "-n", str(ranks)]
    subprocess.run([str(mpiexec), *options, *program], env=environment, timeout=_TIMEOUT_S, check=True)


def _own_ranks(ranks: int, program: list[str], environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meeting = {**environment, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    running = [subprocess.Popen(program, env={**meeting, "RANK": str(rank)}) for rank in range(ranks)]
    for process in running:
        if process.wait(_TIMEOUT_S) != 0:
            raise SystemExit(f"a rank ended with status {process.returncode}")


def _compare_transports() -> int:
    """Print the cases whose bits differ between mpi and torch, and by how much their losses do."""
    from digest_cases import across_cases

    environment, trainings = _environment(_ROOT), across_cases()
    mpi = dict(_of_processes(_mpiexec, trainings, environment))
    far = []
    equal = refused = 0
    for name, told in _of_processes(_own_ranks, trainings, environment):
        if all(isinstance(each, str) for each in (*told, *mpi[name])) and told == mpi[name]:
            refused += 1
            print(f"{name}: refused on both, {told[0]}")
            continue
        if any(isinstance(each, str) for each in (*told, *mpi[name])):
            print(f"{name}: refused on some ranks only\n  mpi:   {mpi[name]}\n  torch: {told}")
            far.append(name)
            continue
        if _line(told) == _line(mpi[name]):
            equal += 1
            continue
        losses = [
            abs(one - other) / max(abs(other), 1e-9)
            for ours, theirs in zip(told, mpi[name], strict=True)
            for one, other in zip(ours[2], theirs[2], strict=True)
        ]
        print(f"{name}: losses differ by {max(losses):.1e}")
        print(f"  mpi:   {_line(mpi[name])}\n  torch: {_line(told)}")
        if max(losses) > _NEAR or [rank[3] for rank in told] != [rank[3] for rank in mpi[name]]:
            far.append(name)
    print(
        f"{equal} of {len(mpi) - refused} cases have the same bits; too far from each other: {far or 'none'}"
    )
    return int(bool(far))


def _be_rank(folder: Path) -> int:
    """Train all cases of a folder on this rank of an MPI job."""
    from digest_cases import across_cases, train

    import hocket
    from hocket.errors import UserError

    rank = hocket.join().rank
    cases = across_cases()
    for number, name in enumerate(json.loads((folder / "cases.json").read_text())):
        told: Any
        try:
            told = train(cases[name])
        except UserError as error:  # of what cannot be with so many ranks
            told = f"{type(error).__name__}: {error}"
        (folder / f"{number}.{rank}.json").write_text(json.dumps(told))
    return 0


_COMMANDS = {
    "eapipe virtual": "eapipe -n 2 --transport virtual",
    "crossover virtual": "crossover -n 4 --transport virtual",
    "eager virtual": "eager -n 4 --transport virtual 'delays={name: linear_skew, shortest_s: 0.01, longest_s: 0.05}'",
    "agd": "agd -n 2",
}


def _of_command(environment: dict[str, str]) -> Iterator[str]:
    """Run the command line: the model that it writes, and the numbers of its summary that depend on no clock."""
    for name, arguments in _COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "hocket",
                "run",
                *shlex.split(arguments),
                "steps=12",
                "--out",
                folder,
            ]
            subprocess.run(
                command, env=environment, timeout=_TIMEOUT_S, check=True, stdout=subprocess.DEVNULL
            )
            summary = json.loads(Path(folder, "summary.json").read_text())
            keys = ("steps", "train_loss", "valid_loss", "valid_accuracy", "bytes_sent_per_step")
            told = " ".join(f"{key}={summary.get(key)}" for key in keys)
            model = hashlib.sha256(Path(folder, "model.safetensors").read_bytes()).hexdigest()[:8]
            yield f"[hocket run] {name}: weights={model} {told} keys={_short(sorted(summary))}"


# ---- two sides -------------------------------------------------------------------------------------------------------


def _compare(before: list[str], after: list[str]) -> int:
    """Print the lines that differ, and how many."""
    old, new = (dict(line.split(": ", 1) for line in lines) for lines in (before, after))
    differing = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    for name in differing:
        print(f"{name}\n  before: {old.get(name, 'no such case')}\n  after:  {new.get(name, 'no such case')}")
    crashed = [name for name, told in new.items() if "CRASHED" in told]
    print(
        f"{len(differing)} of {len({*old, *new})} lines differ" + (f"; crashed: {crashed}" if crashed else "")
    )
    return int(bool(differing or crashed))


def _lines_of_commit(commit: str, quick: bool) -> list[str]:
    """Return the lines of a commit, from a file if this script has run there before."""
    commit = _git("rev-parse", "--verify", f"{commit}^{{commit}}").strip()
    scripts = [path.read_bytes() for path in (Path(__file__), Path(__file__).with_name("digest_cases.py"))]
    key = _short((scripts, quick, sys.version, version("torch"), version("numpy")))
    kept = Path(tempfile.gettempdir(), f"hocket-digests-{os.getuid()}", f"{commit[:12]}-{key}.txt")
    if not kept.exists():
        with _worktree(commit) as root:
            lines = _lines(root, quick)
        kept.parent.mkdir(exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_text("\n".join(lines))
        partial.replace(kept)
    return kept.read_text().splitlines()


@contextmanager
def _worktree(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "checkout")
        _git("worktree", "add", "--detach", str(root), commit)
        try:
            yield root
        finally:
            _git("worktree", "remove", "--force", str(root))


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
