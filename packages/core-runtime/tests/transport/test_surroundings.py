"""Environments as they are: no HOME, an mpi4py that cannot be loaded."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from hocket.transport import launching
from hocket.transport.mpi_there import why_no_mpi4py
from hocket.transport.rank_process import home, variables_of_ranks


def test_ranks_have_a_home_where_the_environment_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", "/somebody")
    assert home() == {}
    assert variables_of_ranks(1)["HOME"] == "/somebody"
    monkeypatch.delenv("HOME")
    assert Path(home()["HOME"]).is_dir()
    assert variables_of_ranks(1)["HOME"] == home()["HOME"]
    monkeypatch.setattr("os.path.expanduser", lambda path: str(tmp_path / "nowhere"))
    assert Path(home()["HOME"]).is_dir()


@pytest.mark.parametrize("raised", ["ImportError('no libmpi')", "RuntimeError('no libmpi')"])
def test_an_mpi4py_that_does_not_import_leaves_transport_torch(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    why_no_mpi4py.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert launching.usable_mpiexec() is None
        kind = raised.partition("(")[0]
        assert why_no_mpi4py() == f"{kind}: no libmpi"
        assert [record.message for record in caplog.records] == [
            f"mpi4py is installed and does not import ({kind}: no libmpi): ranks meet over transport torch; "
            "`hocket doctor` says more"
        ]
    finally:
        why_no_mpi4py.cache_clear()
