"""The command that installs a package of Hocket, from where hocket-core came: an index, a clone or a git URL."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import distribution
from pathlib import Path, PurePath, PurePosixPath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ["how_to_install"]

_CORE = "hocket-core"


def how_to_install(package: str, extra: str = "") -> str:
    """Return the command that installs a package of the repository, or adds an extra to it.

    pip notes in `direct_url.json` where a package came from, unless it was an index (PEP 610).

    Args:
        package: such as `hocket-eager`.
        extra: such as `mpi`; empty for none.
    """
    origin = _origin()
    extras = f"[{extra}]" if extra else ""
    options: list[str] = []
    what = package + extras
    if "dir_info" in origin:
        folder = _beside(Path(url2pathname(urlsplit(origin["url"]).path)), package)
        if Path(folder).is_dir():
            options = ["-e"] if origin["dir_info"].get("editable") else []
            what = f"{folder}{extras}"
    elif "vcs_info" in origin and "subdirectory" in origin:
        source = origin["vcs_info"]
        folder_there = _beside(PurePosixPath(origin["subdirectory"]), package)
        what += f" @ {source['vcs']}+{origin['url']}@{source['commit_id']}#subdirectory={folder_there}"
    return shlex.join(["pip", "install", *options, what])


def _origin() -> dict[str, Any]:
    """Return where hocket-core came from; empty where it was an index."""
    origin: dict[str, Any] = json.loads(distribution(_CORE).read_text("direct_url.json") or "{}")
    return origin


def _beside(core: PurePath, package: str) -> PurePath:
    """Return a package's folder, from that of hocket-core."""
    return core if package == _CORE else core.parent / package.removeprefix("hocket-")
