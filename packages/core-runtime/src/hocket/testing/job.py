"""A job of real ranks that carry out functions by name: conformance suites over processes.

`python -m hocket.testing.job` is one of its ranks. Rank 0 reads lines `[module, function, args]` from standard input,
and all ranks carry them out. An empty line ends the job: mpiexec does not pass on that its own input has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING, TypeVar

from hocket.launch.mpiexec import find_mpiexec
from hocket.training.startup import defer_dynamo
from hocket.transport.job_folder import job_folder, shared_job_folder
from hocket.transport.peer import Peer, gather

if TYPE_CHECKING:
    from hocket.checkpoint.tree import JSON  # which imports torch: ranks of a transport's tests need none

__all__ = ["Job"]

T = TypeVar("T")

# A rank whose neighbour failed gives up after this, so that the failure is reported.
_TIMEOUT_S = 20.0
_BETWEEN_S = 600.0


class Job:
    """A job of ranks that wait for something to do.

    Args:
        size: the number of ranks.
        modules: a further folder in which they find modules, for instance the tests' own.
        transport: `mpi` or `torch`.
    """

    def __init__(self, size: int, modules: Path | None = None, transport: str = "mpi") -> None:
        found = [str(modules or ""), os.environ.get("PYTHONPATH", "")]
        self._folders = ExitStack()
        folder = self._folders.enter_context(job_folder(Path(gettempdir())))
        variables = self._folders.enter_context(shared_job_folder())
        program = [sys.executable, "-m", "hocket.testing.job"]
        if transport == "torch":
            from hocket.transport.meeting.store import serve_store

            self._store = serve_store()
            command = [*program, str(size), str(self._store.port)]
        else:
            command = find_mpiexec().command(size, program, folder=folder)
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, found))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, body: Callable[..., T], args: tuple[object, ...]) -> list[T]:
        """Run `body(peer, *args)` on every rank.

        Args:
            body: a function that the ranks can import by its module and name.
            args: JSON values.

        Returns:
            What the ranks returned, by rank: JSON values.

        Raises:
            AssertionError: a rank raised; carries the tracebacks. The job is of no more use then.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([body.__module__, body.__name__, args]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the ranks ended with exit status {self._process.wait()}")
        answers = json.loads(line)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise AssertionError("\n".join(errors))
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        """Let the ranks leave; end those that do not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._process.stdout.close()
        self._folders.close()


def _join(size: str = "", port: str = "") -> Peer:
    """Return this process's endpoint: in MPI's world, or among so many ranks, all but this one forked here."""
    defer_dynamo()
    if not size:
        from hocket.transport import mpi

        return mpi.join()
    import torch  # noqa: F401 (once for all ranks)

    from hocket.transport.meeting import Rendezvous
    from hocket.transport.tcp import join

    rank = next((rank for rank in range(1, int(size)) if os.fork() == 0), 0)
    return join(Rendezvous(rank, int(size), "127.0.0.1", int(port), "job"))


def _serve(peer: Peer) -> None:
    peer.timeout_s = _TIMEOUT_S
    while True:
        line = sys.stdin.readline() if peer.rank == 0 else ""
        command = peer.allgather_bytes(line.encode(), _BETWEEN_S)[0]
        if not command.strip():
            return
        module, name, args = json.loads(command)
        results = gather(peer, _carry_out(peer, module, name, args), _BETWEEN_S)
        if peer.rank == 0:
            print(json.dumps(results), flush=True)


def _carry_out(peer: Peer, module: str, name: str, args: list[JSON]) -> dict[str, JSON]:
    try:
        return {"result": getattr(importlib.import_module(module), name)(peer, *args)}
    except Exception:
        return {"error": f"rank {peer.rank}: {traceback.format_exc()}"}


if __name__ == "__main__":
    _serve(_join(*sys.argv[1:]))
