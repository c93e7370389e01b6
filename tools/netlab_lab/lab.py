"""Labs: made, found again, and removed, also those whose owner was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from netlab_lab import links
from netlab_lab.links import Link, Traffic
from netlab_lab.system import NetlabError, call

_FOLDER = Path("/run/hocket-netlab")
_NAMESPACES = Path("/run/netns")
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "netlab-"
_REMOVAL_TIMEOUT_S = 10.0
_ENDING_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

# How `hocket launch` and Open MPI's mpiexec come from one host to the others, wherever they are called.
_LAUNCHERS = {
    "HOCKET_SSH": "sh {folder}/agent",
    # Daemons are started by entering a host instead of by ssh, all from where mpiexec is.
    "PRTE_MCA_plm_ssh_agent": "sh {folder}/agent",
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "PRTE_MCA_prte_if_include": links.NETWORK,
    # Memory within a host, TCP between hosts, and nothing that would know that all is one machine.
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_btl_tcp_if_include": links.NETWORK,
}

# What makes a process one of another host's: its network, its name, its shared memory. The name is what MPI
# tells hosts apart by, and a shared memory in common would let ranks find short cuts that hosts do not have.
# Everything else, also all files, is the machine's. The machine's shared memory is kept at the lab's `shm`, for
# whoever enters a host from inside another.
_ENTER = """\
host=$1
shift
exec ip netns exec {name}-$host unshare --uts --ipc --mount sh -c '
    host=$0
    hostname {name}-$host &&
    mount --bind {folder}/hosts /etc/hosts &&
    {{ [ -d {folder}/shm/{name}-$host ] || mount --bind /dev/shm {folder}/shm; }} &&
    mount --bind {folder}/shm/{name}-$host /dev/shm &&
    export NETLAB_HOST=$host {launchers} &&
    exec "$@"' "$host" "$@"
"""

# Called as ssh is: with options, a host's name, which ends in its number, and words for its shell.
_AGENT = """\
while [ "$1" = -o ]; do shift 2; done
host=${{1##*[!0-9]}}
shift
exec sh {folder}/enter "$host" sh -c "$*"
"""


@dataclass
class Lab:
    """Hosts that exist now.

    Attributes:
        key: what the user calls it by.
        hosts: how many.
        rate: of each link, as the user wrote it.
    """

    key: str
    hosts: int
    rate: str
    _lock: IO[str] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The prefix of its namespaces' and hosts' names."""
        return _PREFIX + self.key

    @property
    def folder(self) -> Path:
        """The folder of its record and its scripts."""
        return _FOLDER / self.key

    def hostname(self, host: int) -> str:
        """Return the name of a host, which is also its namespace's."""
        return f"{self.name}-{host}"

    def hostnames(self) -> list[str]:
        """Return the names of all hosts."""
        return [self.hostname(host) for host in range(self.hosts)]

    def inside(self, host: int, command: list[str]) -> list[str]:
        """Return the command that runs another one inside a host."""
        return ["sh", str(self.folder / "enter"), str(host), *command]

    def traffic(self) -> list[Traffic]:
        """Return what has crossed each host's link so far."""
        return links.traffic(f"{self.name}-switch", self.hostnames())

    def build(self) -> None:
        """Make the namespaces and links, and the scripts that enter them."""
        names = "".join(
            f"{links.address(host)} {self.hostname(host)} host{host}\n" for host in range(self.hosts)
        )
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
        # Through sh: /run is often mounted noexec. Double quotes, as the script has single ones.
        launchers = " ".join(
            f'{name}="{value.format(folder=self.folder)}"' for name, value in _LAUNCHERS.items()
        )
        values = {"name": self.name, "folder": self.folder, "launchers": launchers}
        (self.folder / "enter").write_text(_ENTER.format(**values))
        (self.folder / "agent").write_text(_AGENT.format(**values))
        (self.folder / "shm").mkdir()
        for host in self.hostnames():
            (_SHARED_MEMORY / host).mkdir()
        links.connect(f"{self.name}-switch", self.hostnames(), Link(links.parse_rate(self.rate)))

    def remove(self) -> None:
        """Remove the lab and end what runs in it; what is gone already is no error.

        Signals wait meanwhile: a second Ctrl-C must not leave half of it.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING_SIGNALS)
        try:
            namespaces = _namespaces(self.name)
            _end_processes(namespaces)
            for namespace in namespaces:
                call("ip", "netns", "delete", namespace)
            for folder in _SHARED_MEMORY.glob(f"{self.name}-*"):
                shutil.rmtree(folder, ignore_errors=True)
            # The record goes last: an interrupted removal is found and done again.
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._lock is not None:
                self._lock.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def create(hosts: int, rate: str) -> Iterator[Lab]:
    """Make a lab that lasts as long as the context, and remove those of dead owners first.

    Raises:
        NetlabError: the system refused.
    """
    lab = Lab(secrets.token_hex(3), hosts, rate)
    try:
        with _registry():
            _remove_dead()
            lab.folder.mkdir()
            # Locked as long as this process lives, whatever ends it. The number alone would not do: it may
            # by now be another process's.
            lab._lock = (lab.folder / "owner").open("w")
            fcntl.flock(lab._lock, fcntl.LOCK_EX)
            lab._lock.write(f"{os.getpid()} {hosts} {rate}\n")
            lab._lock.flush()
        lab.build()
        yield lab
    finally:
        lab.remove()


def find(key: str) -> Lab:
    """Return a lab that another process owns.

    Raises:
        NetlabError: there is none.
    """
    alive = labs()
    for _, lab in alive:
        if lab.key == key:
            return lab
    raise NetlabError(f"no lab {key}; there are: {', '.join(lab.key for _, lab in alive) or 'none'}")


def labs() -> list[tuple[int, Lab]]:
    """Return the labs with a living owner, and its process."""
    with _registry():
        return [(owner, lab) for owner, lab, dead in _records() if not dead]


def remove_dead() -> list[tuple[int, Lab]]:
    """Remove labs whose owner has died, and return them, each with the process that it was."""
    with _registry():
        return _remove_dead()


def _remove_dead() -> list[tuple[int, Lab]]:
    removed = [(owner, lab) for owner, lab, dead in _records() if dead]
    for _, lab in removed:
        lab.remove()
    return removed


@contextlib.contextmanager
def _registry() -> Iterator[None]:
    """Keep other netlabs from making or removing records meanwhile."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    with (_FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _records() -> list[tuple[int, Lab, bool]]:
    """Return the owner of each lab, the lab, and whether the owner is dead."""
    found = []
    for folder in sorted(_FOLDER.iterdir()):
        if not folder.is_dir():
            continue
        owner, hosts, rate, dead = 0, 0, "?", True
        # A record without its file, or with an empty one, was being made when its owner was killed.
        with contextlib.suppress(FileNotFoundError), (folder / "owner").open() as record:
            dead = _unlocked(record)
            words = record.read().split()
            if len(words) == 3:
                owner, hosts, rate = int(words[0]), int(words[1]), words[2]
        found.append((owner, Lab(folder.name, hosts, rate), dead))
    return found


def _unlocked(record: IO[str]) -> bool:
    try:
        fcntl.flock(record, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _namespaces(name: str) -> list[str]:
    return sorted(path.name for path in _NAMESPACES.glob(f"{name}-*"))


def _end_processes(namespaces: list[str]) -> None:
    """Kill what runs in the namespaces, until nothing does: one killed may just have started another."""
    deadline_s = time.monotonic() + _REMOVAL_TIMEOUT_S
    while time.monotonic() < deadline_s:
        processes = {
            int(number) for name in namespaces for number in call("ip", "netns", "pids", name).split()
        }
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
