"""The rendezvous of a job's ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hocket.errors import UserError
from hocket.transport.peer import DEFAULT_TIMEOUT_S

_LAST_PORT = 65_535


@dataclass(frozen=True)
class Rendezvous:
    """A TCPStore in which the ranks of a job find each other, and this rank among them.

    Attributes:
        rank: this process's.
        size: number of the job's ranks.
        host: the store's, by name or address.
        port: the store's.
        prefix: of the keys, unique among the jobs of a store: the launcher's name for the job.
        serves: whether this rank runs the store; no rank does where a launcher does.
        ports: the ports that this rank may listen on, where a firewall lets only some pass; any where None.
        timeout_s: longest wait of ranks for each other here, in seconds.
        lasts: whether the store outlives an attempt that has failed, as a launcher's does.
        job: the launcher's name for the job, empty if it has none; ranks of another one are refused.
        islands: number of jobs of their own with as many ranks each that meet there; 1 for a job alone.

    Raises:
        UserError: there is no such rank.
    """

    rank: int
    size: int
    host: str
    port: int
    prefix: str
    serves: bool = False
    ports: range | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    lasts: bool = False
    job: str = ""
    islands: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UserError(f"there is no rank {self.rank} in a job of {self.size}")

    @property
    def island(self) -> int:
        """Return the number of this rank's island."""
        return self.rank * self.islands // self.size

    @property
    def place(self) -> int:
        """Return this rank's number within its island."""
        return self.rank % (self.size // self.islands)

    @property
    def how_to_come(self) -> str:
        """Return what to look at where an island does not come."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return (
            f"start each with its HOCKET_ISLAND, 0 to {self.islands - 1}, with "
            f"HOCKET_ISLANDS={self.islands} and HOCKET_MEET={host}:{self.port}, and make sure that the "
            "network allows connections to this port of island 0's first host"
        )

    @property
    def of_its_own(self) -> str:
        """Return how a job gets a store of its own."""
        if self.islands > 1:
            return "name another free port in HOCKET_MEET, and give each island a HOCKET_ISLAND of its own"
        return "give each job a MASTER_PORT of its own"


def parse_ports(text: str) -> range:
    """Return the ports of, for instance, `20000-20100`.

    Raises:
        UserError: the text is no such range.
    """
    found = re.fullmatch(r"\s*(\d{1,9})\s*-\s*(\d{1,9})\s*", text)
    if found is None or not 0 < int(found[1]) <= int(found[2]) <= _LAST_PORT:
        raise UserError(f"HOCKET_PORTS={text!r} is not a range of ports: write for instance 20000-20100")
    return range(int(found[1]), int(found[2]) + 1)
