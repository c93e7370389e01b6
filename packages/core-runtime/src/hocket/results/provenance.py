"""The provenance of a run: its starts, in `run.json`, and copies of the user's own modules."""

from __future__ import annotations

import ast
import json
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from itertools import groupby
from pathlib import Path

from hocket.disk import write_text
from hocket.installing import installed_version, origin_of_core, source_folder, user_file
from hocket.own_files import set_aside
from hocket.plain import Tree, TreeView, flattened
from hocket.plugin.discovery import CORE, installed
from hocket.plugin.markers import PROJECT
from hocket.results import SOURCE, STARTS
from hocket.strict_json import dumps

_log = logging.getLogger(__name__)

_PACKAGES = (CORE.package, "torch", "numpy", "numba", "mpi4py")
#: The keys of a run's configuration that may hold `module:attribute`.
_NAMING = ("task", "optimizer", "schedulers")
_GIT_TIMEOUT_S = 10.0
#: A larger module, such as one of tables, is copied only where a configuration names it.
_LARGEST_BYTES = 1 << 20


def describe_start() -> Tree:
    """Return the command, time, working directory, git commit and versions of this start.

    `git` is None outside of a repository; its `dirty` says whether tracked files differ from the commit. `hocket` is
    the same for Hocket's own source, and None if it was installed from a package index.
    """
    return {
        "command": shlex.join([_program(), *sys.argv[1:]]),
        "directory": os.getcwd(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git(os.getcwd()),
        "hocket": _git_of_hocket(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
    }


def _program() -> str:
    """Return the name of this process's program: `hocket`, or a script's path."""
    path = Path(sys.argv[0])
    return "hocket" if path.stem in ("hocket", "__main__", "ranking") else os.path.relpath(path)


def add_start(folder: Path, start: TreeView, *, anew: bool = False) -> None:
    """Append a start to a folder's `run.json`, the list of all starts.

    Args:
        folder: the folder of a run or of a sweep.
        start: the mapping of `describe_start`, with any further keys.
        anew: leave out earlier starts, which were another run's.
    """
    path = folder / STARTS
    earlier = [] if anew else starts_in(folder)
    if not anew and path.exists() and not earlier:
        _log.warning("%s is damaged: its content is kept as %s", path, set_aside(path).name)
    write_text(path, dumps([*earlier, start], indent=2) + "\n")


def ranks_by_host(host_names: Sequence[str]) -> dict[str, str]:
    """Return each host's ranks, such as `0-3, 8`, from the host names by rank."""
    return {
        host: _ranges(rank for rank, name in enumerate(host_names) if name == host)
        for host in dict.fromkeys(host_names)
    }


def keep_user_modules(config: TreeView, folder: Path, *, resumed: bool = False) -> list[str]:
    """Copy a run's own modules to a folder's `source`, and return the copies' paths within the folder.

    The copies can be run: `cd FOLDER/source; hocket run ../config.yaml`. Modules that the task imports are copied, too;
    those of installed packages are left out. Earlier copies are kept: where a run goes on with other code, the new ones
    go to `source-2` and so on.

    Args:
        config: the run's complete configuration; the modules that it names have been imported.
        folder: the folder of the run's results.
        resumed: whether the run in the folder goes on; a warning names the modules that have changed since.
    """
    name, starts = SOURCE, starts_in(folder)
    if resumed and starts:
        changed = changed_modules(config, folder)
        name = f"{SOURCE}-{len(starts) + 1}" if changed else _source_of(starts[-1])
        if changed:
            _log.warning(
                "the run in %s continues with changed code: %s changed since; both versions are kept, the new one "
                "in %s",
                folder,
                ", ".join(changed),
                folder / name,
            )
    modules = _user_modules(config)
    own = {folder / kept for start in starts for kept in start.get("sources", ())}
    place = 2
    while any(_in_the_way(folder / name / path, found, own) for path, found in modules.items()):
        name, place = f"{SOURCE}-{place}", place + 1
    kept = []
    for path, found in modules.items():
        target = folder / name / path
        if not (target.exists() and target.samefile(found)):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target)
        kept.append(str(Path(name) / path))
    return sorted(kept)


def _in_the_way(target: Path, module: Path, own: Collection[Path]) -> bool:
    """Return whether something else than a copy of the module, of this or an earlier run, is at its path."""
    if target in own or not os.path.lexists(target):
        folder = next((each for each in target.parents if os.path.lexists(each)), target.parent)
        return not folder.is_dir()
    return _read(target) != _read(module)


def imported_versions(config: TreeView) -> dict[str, str]:
    """Return the versions of the installed packages that the user's own modules import, by package.

    Args:
        config: the run's complete configuration; the modules that it names have been imported.
    """
    files = [file for file in _user_modules(config).values() if file.suffix == ".py"]
    names = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_bytes()))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    packages = packages_distributions() if names else {}  # a look through all that is installed
    return {package: version(package) for name in sorted(names) for package in packages.get(name, ())}


def changed_modules(config: TreeView, folder: Path) -> list[str]:
    """Return the user's own modules that have changed since a folder's run was last started.

    Args:
        config: the run's complete configuration; the modules that it names have been imported.
        folder: the folder of the run's results; without `run.json`, nothing is known to have changed.
    """
    starts = starts_in(folder)
    changed = []
    for kept in starts[-1].get("sources", ()) if starts else ():
        path = _below_source(kept)
        places = (root / path for root in (Path.cwd(), *_roots(config)))
        found = next((place for place in places if place.is_file()), None)
        if (
            found is not None
            and (folder / kept).is_file()
            and found.read_bytes() != (folder / kept).read_bytes()
        ):
            changed.append(str(path))
    return changed


def module_contents(config: TreeView) -> dict[Path, bytes]:
    """Return the present contents of the user's own modules that a run would copy, by path.

    Args:
        config: the run's complete configuration; the modules that it names have been imported.
    """
    return {file: file.read_bytes() for file in _user_modules(config).values()}


def changed_since(contents: Mapping[Path, bytes]) -> list[str]:
    """Return the files that have changed or gone since `module_contents`."""
    return [os.path.relpath(file) for file, held in contents.items() if _read(file) != held]


def kept_modules(folder: Path) -> dict[str, set[bytes]]:
    """Return the contents of a run's own modules, by path: one for each version that it ran with."""
    found: dict[str, set[bytes]] = {}
    for start in starts_in(folder):
        for kept in start.get("sources", ()):
            if (folder / kept).is_file():
                found.setdefault(str(_below_source(kept)), set()).add((folder / kept).read_bytes())
    return found


def _user_modules(config: TreeView) -> dict[Path, Path]:
    """Return the files of the user's own modules, by their path below a folder of modules.

    They are the modules that a configuration names, and those imported from the working directory or from the folders
    of the named ones.
    """
    found = {_path_of(module, file): file for module, file in _named(config)}
    main = user_file("__main__")
    if main is not None and main.suffix == ".py" and sys.modules["__main__"].__spec__ is None:
        found[Path(main.name)] = main  # a script
    roots = [Path.cwd(), *_roots(config)]
    for module in list(sys.modules):
        file = None if module.partition(".")[0] == PROJECT else user_file(module)
        if file is None or file.suffix != ".py" or file.stat().st_size > _LARGEST_BYTES:
            continue
        path = _path_of(module, file)
        if any(root / path == file for root in roots):
            found[path] = file
    return found


def _named(config: TreeView) -> Iterator[tuple[str, Path]]:
    """Yield the user's own modules that a configuration names, and their files."""
    for named in flattened({key: config.get(key) for key in _NAMING}).values():
        module, separator, _ = str(named).partition(":")
        found = user_file(module) if separator else None
        if found is not None:
            yield module, found


def _roots(config: TreeView) -> list[Path]:
    """Return the folders that the modules which a configuration names were found in."""
    return [found.parents[len(_path_of(module, found).parts) - 1] for module, found in _named(config)]


def _path_of(module: str, file: Path) -> Path:
    path = Path(*module.split("."))
    return path / file.name if file.stem == "__init__" else path.with_suffix(file.suffix)


def starts_in(folder: Path) -> list[Tree]:
    """Return the starts in a folder's `run.json`; none if that is missing or damaged."""
    try:
        found = json.loads((folder / STARTS).read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(map(_is_start, found)) else []


def _is_start(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    sources = value.get("sources", [])
    return isinstance(sources, list) and all(
        isinstance(kept, str) and kept.partition("/")[2] for kept in sources
    )


def _read(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:  # gone, or being replaced
        return None


def _source_of(start: TreeView) -> str:
    return next((Path(kept).parts[0] for kept in start.get("sources", ())), SOURCE)


def _below_source(kept: str) -> Path:
    return Path(*Path(kept).parts[1:])


def _git_of_hocket() -> Tree | None:
    try:
        origin = origin_of_core()
    except PackageNotFoundError:
        return None
    if "vcs_info" in origin:
        return {"commit": origin["vcs_info"]["commit_id"], "dirty": False}
    if origin.get("dir_info", {}).get("editable"):
        return _git(str(source_folder(origin)))
    return None


def _git(folder: str) -> Tree | None:
    commit = _git_says("-C", folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git_says("-C", folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git_says(*command: str) -> str | None:
    """Return git's output; None without git, outside of a repository, or if git takes too long."""
    try:
        done = subprocess.run(
            ["git", *command], capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    plugins = (entry.dist.name for entry in installed() if entry.dist is not None)
    found = {name: installed_version(name) for name in (*_PACKAGES, *sorted(plugins))}
    return {name: value for name, value in found.items() if value is not None}


def _ranges(ranks: Iterable[int]) -> str:
    """Return ascending numbers as text, consecutive ones as `first-last`."""
    groups = groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    runs = ([rank for _, rank in group] for _, group in groups)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
