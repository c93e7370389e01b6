"""Installed code and the user's own, and the command that installs a package of Hocket from where hocket-core came."""

from __future__ import annotations

import json
import os
import shlex
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path, PurePath, PurePosixPath
from urllib.parse import urlsplit
from urllib.request import url2pathname

from hocket.plain import Tree, TreeView

_CORE = "hocket-core"

#: The folders of code that is not the user's own.
INSTALLED_FOLDERS = tuple(map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")))


def how_to_install(package: str, extra: str = "") -> str:
    """Return the command that installs a package of the repository, or adds an extra to it.

    Args:
        package: such as `hocket-eager`.
        extra: such as `mpi`; empty for none.
    """
    origin = origin_of_core()
    extras = f"[{extra}]" if extra else ""
    options: list[str] = []
    what = package + extras
    if "dir_info" in origin:
        folder = _beside(source_folder(origin), package)
        if Path(folder).is_dir():
            options = ["-e"] if origin["dir_info"].get("editable") else []
            what = f"{folder}{extras}"
    elif "vcs_info" in origin and "subdirectory" in origin:
        source = origin["vcs_info"]
        folder_there = _beside(PurePosixPath(origin["subdirectory"]), package)
        what += f" @ {source['vcs']}+{origin['url']}@{source['commit_id']}#subdirectory={folder_there}"
    return shlex.join(["pip", "install", *options, what])


def origin_of_core() -> Tree:
    """Return hocket-core's origin, from pip's `direct_url.json` (PEP 610); empty for an index."""
    origin: Tree = json.loads(distribution(_CORE).read_text("direct_url.json") or "{}")
    return origin


def source_folder(origin: TreeView) -> Path:
    """Return the folder that an origin with `dir_info` names."""
    return Path(url2pathname(urlsplit(origin["url"]).path))


def installed_version(package: str) -> str | None:
    """Return a package's version, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _beside(core: PurePath, package: str) -> PurePath:
    """Return a package's folder, given that of hocket-core."""
    return core if package == _CORE else core.parent / package.removeprefix("hocket-")


def user_file(module_name: str) -> Path | None:
    """Return the file of an imported module; None if it has none, or is an installed package's."""
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if file is None or file.startswith(INSTALLED_FOLDERS) or not os.path.isfile(file):
        return None
    return Path(file)
