"""Connections between all ranks of a job: each rank connects to lower ranks, and accepts higher ones.

A connection begins with both ranks' numbers and a proof: a keyed hash of these under the job's token, compared in
constant time. The other end answers with another. A stranger's connection is closed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from hocket.errors import ExchangeTimeoutError, UserError
from hocket.transport.meeting.addresses import (
    Address,
    host_addresses,
    is_near,
    listen,
    network_host,
    route_to,
)
from hocket.transport.meeting.rendezvous import Rendezvous
from hocket.transport.meeting.store import LOOK_EVERY_S, StoreRanks
from hocket.transport.status import number_ranks
from hocket.transport.waiting import wait

_HELLO = struct.Struct("<8sii32s")
_MAGIC = b"hocket 1"
_PROOF_BYTES = 32
# What a connection may take to be made, and to say who it is, in seconds.
_CONNECTING_TO_RANK_S = 3.0
_GREETING_S = 5.0
# What a system says that gives a process, or all of them, no more descriptors.
_RUN_OUT = (errno.EMFILE, errno.ENFILE)
# A host that is gone without a word is found out after about a minute: by questions on a silent connection, and by what
# nobody acknowledges.
_SILENT_S, _ASKING_S, _QUESTIONS = 30, 10, 3
_UNACKNOWLEDGED_MS = 60_000


class ListeningAddress(NamedTuple):
    """The address at which a rank listens; JSON.

    Attributes:
        host: see `network_host`.
        near_store: whether the store is on the same host: its address for others is then a good one.
        addresses: of the host, the likeliest first.
        port: its listening port.
        token: the secret that proves a rank of the job; rank 0's counts.
    """

    host: str
    near_store: bool
    addresses: Sequence[Address]
    port: int
    token: str


def connect_all(ranks: StoreRanks, rendezvous: Rendezvous) -> dict[int, socket.socket]:
    """Return a connection to each other rank, by rank; collective.

    Raises:
        ExchangeTimeoutError: some ranks cannot be reached, or did not connect; names them.
    """
    with listen(rendezvous.ports, rendezvous.size) as listener:
        route = route_to(rendezvous.host, rendezvous.port)
        near = is_near(route)
        addresses = host_addresses() if near else list(dict.fromkeys([route[0], *host_addresses()]))
        port, token = listener.getsockname()[1], secrets.token_hex(_PROOF_BYTES)
        gathered = ranks.gather(ListeningAddress(network_host(), near, addresses, port, token))
        places = [ListeningAddress(*place) for place in gathered]
        meeting = Handshake(rendezvous, bytes.fromhex(places[0].token))
        with Acceptor(meeting, listener) as acceptor:
            sockets = {rank: meeting.reach(rank, places) for rank in range(rendezvous.rank)}
            sockets |= acceptor.wait()
    for connection in sockets.values():
        _prepare(connection)
    return sockets


class Handshake:
    """The handshake of both ends of a connection.

    Args:
        rendezvous: this rank, and its timeout.
        token: the job's.
    """

    def __init__(self, rendezvous: Rendezvous, token: bytes) -> None:
        self.rendezvous = rendezvous
        self.rank = rendezvous.rank
        self.end_s = time.monotonic() + rendezvous.timeout_s
        self.token = token

    def proof(self, what: str, source: int, target: int) -> bytes:
        """Return a proof that only a rank of the job can make, and only to this one."""
        return hmac.digest(self.token, f"{source} {what} {target}".encode(), hashlib.sha256)

    def reach(self, rank: int, places: Sequence[ListeningAddress]) -> socket.socket:
        """Return a connection to `rank`, at the first of its addresses that answers with a proof."""
        place, failures = places[rank], {}
        while True:
            for address in self._addresses(place, places[self.rank].host):
                try:
                    return self.greet(rank, address, place.port)
                except OSError as error:
                    if error.errno in _RUN_OUT:
                        raise self.run_out(error, f"connect to rank {rank}") from error
                    failures[address] = error.strerror or str(error)
            if time.monotonic() > self.end_s:
                tried = "; ".join(f"{address}: {why}" for address, why in failures.items())
                raise ExchangeTimeoutError(
                    f"rank {self.rank} cannot connect to rank {rank} on port {place.port} ({tried}): is a firewall "
                    "between the hosts? HOCKET_PORTS=20000-20100 sets the ports to use"
                )
            time.sleep(LOOK_EVERY_S)

    def run_out(self, error: OSError, what: str) -> UserError:
        """Return the message for a process without descriptors left."""
        return UserError(
            f"rank {self.rank} cannot {what}: {error.strerror} in this process: let it open more, with `ulimit -n`"
        )

    def _addresses(self, place: ListeningAddress, own_host: str) -> list[Address]:
        if place.host == own_host:
            return ["127.0.0.1", "::1", *place.addresses]
        return [self.rendezvous.host, *place.addresses] if place.near_store else list(place.addresses)

    def greet(self, rank: int, address: Address, port: int) -> socket.socket:
        """Return a connection to `rank` at an address.

        Raises:
            OSError: it is not reached, or another process answers.
        """
        connection = socket.create_connection((address, port), _CONNECTING_TO_RANK_S)
        try:
            connection.settimeout(_GREETING_S)
            connection.sendall(_HELLO.pack(_MAGIC, self.rank, rank, self.proof("calls", self.rank, rank)))
            answer = _receive(connection, _PROOF_BYTES)
            if not hmac.compare_digest(answer, self.proof("answers", rank, self.rank)):
                raise ConnectionRefusedError(0, "another process answers there")
        except BaseException:
            connection.close()
            raise
        return connection

    def answer(self, connection: socket.socket) -> int | None:
        """Answer a connection and return its rank; None for a stranger."""
        connection.settimeout(_GREETING_S)
        magic, source, target, proof = _HELLO.unpack(_receive(connection, _HELLO.size))
        expected = self.proof("calls", source, self.rank)
        known = hmac.compare_digest(proof, expected) and magic == _MAGIC
        if not known or target != self.rank or not self.rank < source < self.rendezvous.size:
            return None
        connection.sendall(self.proof("answers", self.rank, source))
        return int(source)


class Acceptor:
    """An acceptor of higher ranks' connections, in threads, so that a silent stranger delays no rank.

    Args:
        meeting: the handshake.
        listener: the socket that they connect to.
    """

    def __init__(self, meeting: Handshake, listener: socket.socket) -> None:
        self._meeting = meeting
        self._listener = listener
        self._sockets: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._over = False
        self._error: UserError | None = None

    def __enter__(self) -> Acceptor:
        self._listener.settimeout(LOOK_EVERY_S)
        threading.Thread(target=self._accept, name="hocket accepting", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True

    def wait(self) -> dict[int, socket.socket]:
        """Return all connections, by rank, once they are there.

        Raises:
            ExchangeTimeoutError: some ranks do not connect; names them.
            UserError: this process has no descriptors left for them.
        """
        meeting = self._meeting
        expected = range(meeting.rank + 1, meeting.rendezvous.size)

        def describe(outcome: str) -> str:
            missing = [rank for rank in expected if rank not in self._sockets]
            return f"rank {meeting.rank} waits for {number_ranks(missing)} to connect: {outcome}"

        with self._changed:
            wait(
                lambda: self._error is not None or len(self._sockets) == len(expected),
                meeting.rendezvous.timeout_s,
                describe,
                lambda _, longest_s: self._changed.wait(longest_s),
            )
            if self._error is not None:
                raise self._error
            return self._sockets

    def _accept(self) -> None:
        while not self._over:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if error.errno in _RUN_OUT:
                    with self._changed:
                        self._error = self._meeting.run_out(error, "accept other ranks' connections")
                        self._changed.notify_all()
                return  # or closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        rank = None
        with contextlib.suppress(OSError):
            rank = self._meeting.answer(connection)
        with self._changed:
            if rank is None or self._over:
                connection.close()
            else:
                if rank in self._sockets:  # it has given up the one before
                    self._sockets[rank].close()
                self._sockets[rank] = connection
                self._changed.notify_all()


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    """Return `nbytes` bytes of a connection.

    Raises:
        OSError: they do not arrive.
    """
    data = b""
    while len(data) < nbytes:
        more = connection.recv(nbytes - len(data))
        if not more:
            raise ConnectionResetError(0, "closed by the other end")
        data += more
    return data


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    options = [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASKING_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _QUESTIONS),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS),
    ]
    for level, name, value in options:
        connection.setsockopt(level, name, value)
