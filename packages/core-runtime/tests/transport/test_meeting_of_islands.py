"""Islands that are jobs of their own meet in one store, and name what keeps them from being one job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hocket.errors import ExchangeTimeoutError, UserError
from hocket.transport.meeting import Rendezvous, islands
from hocket.transport.meeting.islands import Arrival, fault_of, meet_islands
from hocket.transport.meeting.store import serve_store

LONGEST_S = 20.0
Meet = Callable[..., "Future[None]"]


@pytest.fixture
def server() -> TCPStore:
    return serve_store()


@pytest.fixture
def meet(server: TCPStore) -> Iterator[Meet]:
    """Return a function that has a rank of an island come, in a thread of its own."""
    with ThreadPoolExecutor(16) as threads:

        def begin(
            island: int, place: int, ranks: int = 2, number: int = 2, longest_s: float = LONGEST_S
        ) -> Future[None]:
            there = Rendezvous(
                island * ranks + place,
                number * ranks,
                "127.0.0.1",
                server.port,
                "job",
                serves=island == place == 0,
                timeout_s=longest_s,
                islands=number,
            )
            assert (there.island, there.place) == (island, place)
            store = TCPStore(there.host, there.port, is_master=False, wait_for_workers=False)
            return threads.submit(meet_islands, store, there)

        yield begin


def test_islands_wait_for_each_other(meet: Meet) -> None:
    early = [meet(0, 1), meet(1, 0), meet(0, 0)]
    time.sleep(0.3)
    assert not any(each.done() for each in early)
    for each in (*early, meet(1, 1)):
        each.result(LONGEST_S)


@pytest.mark.parametrize(
    ("come", "message"),
    [
        (
            [(0, 0, 2), (0, 1, 2), (1, 0, 3), (1, 1, 3), (1, 2, 3)],
            r"differ in their numbers of ranks \(island 0 on .* has 2, island 1 on .* has 3\): start the same number",
        ),
        ([(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 1)], r"island 0 on .* has 3, island 1 on .* has 1\): "),
        (
            [(0, 0, 1), (0, 0, 1)],
            "two jobs are island 0, on .* give each island a HOCKET_ISLAND of its own, 0 to 1",
        ),
        (
            [(0, 0, 1, 2), (1, 0, 1, 3)],
            r"HOCKET_ISLANDS differ \(island 0 on .* has 2, island 1 on .* has 3\): give all",
        ),
    ],
    ids=["more", "fewer", "one number", "numbers of islands"],
)
def test_all_ranks_hear_what_is_wrong(come: list[tuple[int, ...]], message: str, meet: Meet) -> None:
    begun_s = time.monotonic()
    for rank in [meet(*each) for each in come]:
        error = rank.exception(LONGEST_S)
        assert isinstance(error, UserError)
        assert re.search(message, str(error)), error
    assert time.monotonic() - begun_s < LONGEST_S / 2


def test_a_fault_is_found_before_all_have_come() -> None:
    assert not fault_of([Arrival(0, 0, 2, 3, "a"), Arrival(2, 1, 2, 3, "c")])
    assert "island 0 on a has 2, island 2 on c has 4" in fault_of(
        [Arrival(2, 1, 4, 3, "c"), Arrival(0, 0, 2, 3, "a")]
    )


def test_islands_that_do_not_come_are_named_again_and_again(
    meet: Meet, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One rank of each island tells: the first of those that have come."""
    monkeypatch.setattr(islands, "_FIRST_NOTICE_S", 0.3)
    monkeypatch.setattr(islands, "_NOTICE_EVERY_S", 0.3)
    ranks = [
        meet(island, place, 3, 4, longest_s=1.2) for island, place in ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2))
    ]
    error = ranks[-1].exception(LONGEST_S)
    assert isinstance(error, ExchangeTimeoutError)
    missing = r"waits for islands 2, 3 and rank 0 of 3 of island 1"
    check = (
        r"HOCKET_ISLAND, 0 to 3, with HOCKET_ISLANDS=4 and HOCKET_MEET=127\.0\.0\.1:\d+, and make sure that"
    )
    assert re.fullmatch(rf"island 1 {missing}, no end after 1.2 s: .*{check}.*", str(error))
    lines = capfd.readouterr().err.splitlines()
    for island in range(2):
        own = [
            line
            for line in lines
            if re.fullmatch(rf"hocket: island {island} {missing}, for .*{check}.*", line)
        ]
        assert 2 <= len(own) <= 4, lines


# ------------------------------------------------------------------------------------------ over processes

SCRIPT = "import hocket; peer = hocket.join(); print(peer.rank, peer.size, flush=True)"


def start(folder: Path, island: int, port: int, ranks: int) -> subprocess.Popen[str]:
    """Start an island of two, with a launcher where it has several ranks."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    variables = {"HOCKET_ISLAND": str(island), "HOCKET_ISLANDS": "2", "HOCKET_MEET": f"127.0.0.1:{port}"}
    words = [str(script)]
    if ranks == 1:
        variables |= {"RANK": "0", "WORLD_SIZE": "1"}
    else:
        words = ["-m", "hocket", "launch", "-n", str(ranks), "--transport", "torch", str(script)]
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def free_port() -> int:
    store = serve_store()
    port = store.port
    del store
    return port


def test_jobs_with_other_numbers_of_ranks_end_with_a_line_each(tmp_path: Path, free_port: int) -> None:
    jobs = [start(tmp_path, island, free_port, ranks) for island, ranks in enumerate((2, 1))]
    for island, job in enumerate(jobs):
        _, err = job.communicate(timeout=60)
        lines = [line for line in err.splitlines() if line.startswith("hocket: rank ")]
        assert (job.returncode, len(lines)) == (2, 1), err
        assert re.search(
            r"island 0 on \S+ has 2, island 1 on \S+ has 1\): start the same number of ranks on each island$",
            lines[0],
        )
        assert lines[0].startswith(f"hocket: rank {island}: the islands differ in their numbers of ranks (")


def test_an_island_that_comes_late_is_named_and_joins(tmp_path: Path, free_port: int) -> None:
    early = start(tmp_path, 1, free_port, 1)
    assert early.stderr is not None
    line = early.stderr.readline()
    assert line.startswith("hocket: island 1 cannot reach the store of island 0 at 127.0.0.1 port "), line
    assert "Connection refused): start each with its HOCKET_ISLAND, 0 to 1, with HOCKET_ISLANDS=2" in line
    late = start(tmp_path, 0, free_port, 1)
    for island, job in ((0, late), (1, early)):
        out, err = job.communicate(timeout=60)
        assert (job.returncode, out) == (0, f"{island} 2\n"), err
