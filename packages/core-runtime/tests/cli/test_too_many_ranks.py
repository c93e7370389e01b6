"""A number of ranks that this host's memory cannot hold is refused before one starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hocket.cli.main import cli
from hocket.errors import UserError
from hocket.launch import rank_process
from hocket.launch.rank_process import check_memory


@pytest.fixture
def _little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  4194304 kB\nMemFree: 1 kB\nMemAvailable:  1048576 kB\n")
    monkeypatch.setattr(rank_process, "_MEMORY", str(tmp_path / "meminfo"))


@pytest.mark.usefixtures("_little_memory")
def test_a_gigabyte_holds_ten_ranks() -> None:
    check_memory(10)
    with pytest.raises(
        UserError, match=r"^11 ranks take 1 GB of memory or more, .* 1\.1 GB left, enough for 10:"
    ):
        check_memory(11)


@pytest.mark.usefixtures("_little_memory")
def test_hocket_run_asks_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(UserError, match=r"^20000 ranks take 2,097 GB"):
        cli.main(["run", "sgd", "-n", "20000", "--transport", "torch"], standalone_mode=False)
    assert not [*Path().iterdir()]


def test_where_memory_is_unknown_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "_MEMORY", "/no/such/file")
    check_memory(1 << 16)
