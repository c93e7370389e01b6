"""Run the system's tools (ip, tc) and say what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess

_PROGRAMS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "mount": "mount",
    "hostname": "hostname",
}
# Where Debian keeps ip and tc; `su` leaves it out of PATH.
_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


class NetlabError(Exception):
    """An error that the user can mend; shown in one line."""


def check_system() -> None:
    """See that this process may make hosts here.

    Raises:
        NetlabError: it is not root, or a program is missing.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*folders, *(f for f in _SYSTEM_FOLDERS if f not in folders)])
    missing = [program for program in _PROGRAMS if shutil.which(program) is None]
    reasons = []
    if os.geteuid() != 0:
        reasons.append("needs root (it makes network namespaces): start it with sudo")
    if missing:
        packages = " ".join(sorted({_PROGRAMS[program] for program in missing}))
        reasons.append(f"needs {' and '.join(missing)}: apt-get install {packages}")
    if reasons:
        raise NetlabError("; ".join(reasons))


def call(*command: str) -> str:
    """Run a command and return what it prints.

    Raises:
        NetlabError: it failed; the message holds the command and what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        hint = ""
        if "not permitted" in said or "ermission denied" in said:
            hint = " (in a container, root also needs the capabilities SYS_ADMIN and NET_ADMIN)"
        raise NetlabError(f"`{' '.join(command)}` failed: {said}{hint}")
    return done.stdout
