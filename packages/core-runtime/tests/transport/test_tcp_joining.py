"""How ranks of the torch transport find each other: who is let in, on which ports, at which addresses."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which torch exports

from hocket.errors import ExchangeTimeoutError, TransportError, UserError
from hocket.transport.meeting import Rendezvous, parse_ports, store
from hocket.transport.meeting.addresses import host_addresses, is_near, listen, network_host, route_to
from hocket.transport.meeting.store import StoreEntries, StoreRanks, open_store, serve_store
from hocket.transport.tcp.connecting import Acceptor, Handshake, ListeningAddress, connect_all
from hocket.transport.tcp.peer import _open_world

TOKEN = "5a" * 32


@pytest.fixture
def port() -> Iterator[int]:
    """Run a store, and return where."""
    store = serve_store()
    yield store.port
    del store


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def place_of(rank: int, size: int, port: int, host: str = "127.0.0.1", **other: Any) -> Rendezvous:
    return Rendezvous(rank, size, host, port, "job", timeout_s=10, **other)


def connect(place: Rendezvous) -> dict[int, socket.socket]:
    return connect_all(StoreRanks(open_store(place), place), place)


def close_all(*connected: dict[int, socket.socket]) -> None:
    for sockets in connected:
        for held in sockets.values():
            held.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.1.1"])
def test_every_rank_gets_a_connection_to_each_other(
    host: str, port: int, threads: ThreadPoolExecutor
) -> None:
    """Also where the store's name resolves to the loopback."""
    connected = list(threads.map(connect, [place_of(rank, 3, port, host) for rank in range(3)]))
    assert [sorted(sockets) for sockets in connected] == [[1, 2], [0, 2], [0, 1]]
    for rank, sockets in enumerate(connected):
        for other, held in sockets.items():
            assert held.getsockname()[1] == connected[other][rank].getpeername()[1]
    close_all(*connected)


def test_a_store_of_an_earlier_attempt_has_other_keys(port: int, threads: ThreadPoolExecutor) -> None:
    for attempt in range(2):
        places = [Rendezvous(rank, 2, "127.0.0.1", port, f"run/{attempt}", timeout_s=10) for rank in range(2)]
        close_all(*threads.map(connect, places))


def test_ranks_that_do_not_come_are_named(port: int) -> None:
    place = Rendezvous(1, 4, "127.0.0.1", port, "job", timeout_s=0.3)
    with pytest.raises(
        ExchangeTimeoutError, match=r"^rank 1 waits for ranks 0, 2, 3 of 4 to join the job at .* port "
    ):
        connect(place)


def test_a_store_that_is_not_there_is_named() -> None:
    with listen(None, 1) as gone:
        port = gone.getsockname()[1]
    place = Rendezvous(1, 2, "127.0.0.1", port, "job", timeout_s=0.1)
    with pytest.raises(UserError, match=f"^rank 1 cannot reach the store at 127.0.0.1 port {port}, .*rank 0"):
        open_store(place)


def test_a_port_of_another_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_STARTING_S", 0.5)
    with listen(None, 1) as others:
        port = others.getsockname()[1]
        used = "does another program use this port"
        with pytest.raises(UserError, match=rf"^rank 1 cannot open .* port {port}, .* {used}\?$"):
            open_store(Rendezvous(1, 2, "127.0.0.1", port, "job"))
        with pytest.raises(UserError, match=rf"^rank 0 cannot open .* port {port}, .*address already in use"):
            open_store(Rendezvous(0, 2, "127.0.0.1", port, "job", serves=True))


def test_a_store_that_is_lost_while_ranks_join_is_named(threads: ThreadPoolExecutor) -> None:
    """As it is where rank 0 finds that it has another number of ranks than this one."""
    served = [serve_store()]
    port = served[0].port
    joining = threads.submit(_open_world, place_of(1, 3, port))
    time.sleep(0.5)
    served.clear()
    with pytest.raises(
        TransportError, match=f"^rank 1 of 3 lost the store at 127.0.0.1 port {port}, .*rank 0"
    ):
        joining.result(20)


@pytest.mark.parametrize("serves", [False, True])
def test_a_host_that_is_not_known_is_named(serves: bool) -> None:
    place = Rendezvous(0, 2, "nobody.invalid", 29500, "job", serves=serves, timeout_s=0.1)
    with pytest.raises(UserError, match=r"^rank 0 cannot find the store at nobody\.invalid port 29500, "):
        open_store(place)


# ------------------------------------------------------------------------------------------------ who is let in


@pytest.fixture
def waiting(port: int, threads: ThreadPoolExecutor) -> tuple[Handshake, int, Future[Any]]:
    """Return rank 1's words, and where rank 0 waits for its connection; the store has rank 1's place."""
    store = open_store(place_of(1, 2, port))
    store.set("1/1", json.dumps(ListeningAddress(network_host(), True, [], 1, TOKEN)))
    joining = threads.submit(connect, place_of(0, 2, port))
    told = ListeningAddress(*json.loads(store.get("1/0")))
    return Handshake(place_of(1, 2, port), bytes.fromhex(told.token)), told.port, joining


def hello(meeting: Handshake, port: int) -> socket.socket:
    return meeting.greet(0, "127.0.0.1", port)


def is_closed(held: socket.socket) -> bool:
    held.settimeout(5)
    try:
        return held.recv(100) == b""
    except ConnectionResetError:
        return True


def test_strangers_are_closed_and_the_rank_is_let_in(
    waiting: tuple[Handshake, int, Future[Any]], port: int
) -> None:
    meeting, listening, joining = waiting
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", listening))) for _ in range(3)]
        held[0].sendall(b"GET / HTTP/1.1\r\nHost: somebody.example.org\r\nAccept: */*\r\n\r\n")
        held[1].sendall(b"hocket 1" + bytes(40))  # held[2] is silent, and holds up nobody
        assert is_closed(held[0])
        assert is_closed(held[1])
        for stranger in [
            Handshake(meeting.rendezvous, bytes.fromhex(TOKEN)),  # another token than the job's
            Handshake(place_of(3, 4, port), meeting.token),  # a rank that the job has not
        ]:
            with pytest.raises(OSError):
                hello(stranger, listening)
        assert not joining.done()
        with hello(meeting, listening) as rank_1:
            [(rank, rank_0)] = joining.result(10).items()
            assert rank == 1
            assert rank_0.getpeername()[1] == rank_1.getsockname()[1]
            rank_0.close()


def test_every_proof_is_of_its_own_two_ranks() -> None:
    """What one rank has said cannot be said again by another, nor to another, nor back."""
    words = Handshake(place_of(1, 3, 1), bytes(32))
    proofs = {
        words.proof(what, source, target)
        for what in ("calls", "answers")
        for source in range(3)
        for target in range(3)
    }
    assert len(proofs) == 18


def test_addresses_are_tried_until_the_rank_answers(threads: ThreadPoolExecutor) -> None:
    """At the first nobody listens, at the second somebody else does."""
    token = bytes.fromhex(TOKEN)
    with (
        socket.create_server(("127.0.0.3", 0)) as listener,
        socket.create_server(("127.0.0.2", listener.getsockname()[1])) as stranger,
        Acceptor(Handshake(place_of(0, 2, 1), token), listener) as acceptor,
    ):

        def answer_wrongly() -> None:
            with stranger.accept()[0] as held:
                held.sendall(b"220 mail.example.org ESMTP at your service")
                is_closed(held)

        answering = threads.submit(answer_wrongly)
        addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
        port = listener.getsockname()[1]
        places = [
            ListeningAddress("a", False, addresses, port, TOKEN),
            ListeningAddress("b", False, [], 1, TOKEN),
        ]
        with Handshake(place_of(1, 2, 1), token).reach(0, places) as rank_1:
            rank_0 = acceptor.wait()[1]
            assert rank_1.getpeername() == ("127.0.0.3", port)
            assert rank_0.getpeername()[1] == rank_1.getsockname()[1]
            rank_0.close()
        answering.result(10)


def test_a_rank_behind_a_firewall_is_named() -> None:
    place = Rendezvous(1, 2, "127.0.0.1", 1, "job", timeout_s=0.1)
    places = [
        ListeningAddress("a", False, ["127.0.0.1"], 1, TOKEN),
        ListeningAddress("b", False, [], 1, TOKEN),
    ]
    expected = (
        r"rank 1 cannot connect to rank 0 on port 1 \(127.0.0.1: Connection refused\): .* HOCKET_PORTS="
    )
    with pytest.raises(ExchangeTimeoutError, match=expected):
        Handshake(place, b"").reach(0, places)


# ------------------------------------------------------------------------------------------- ports and addresses


def free_ports(number: int) -> range:
    """Return adjacent ports of which none is used."""
    for first in range(23_000, 32_000, number):
        ports = range(first, first + number)
        try:
            with ExitStack() as stack:
                for port in ports:
                    stack.enter_context(listen(range(port, port + 1), 1))
        except UserError:
            continue
        return ports
    raise AssertionError("no free ports")


def test_ranks_listen_on_the_ports_that_a_firewall_lets_pass(port: int, threads: ThreadPoolExecutor) -> None:
    ports = free_ports(2)
    places = [place_of(rank, 3, port, ports=ports) for rank in range(3)]
    joining = [threads.submit(connect, place) for place in places[:2]]
    store = open_store(places[0])
    listening = {ListeningAddress(*json.loads(store.get(f"1/{rank}"))).port for rank in range(2)}
    assert listening == set(ports)
    with pytest.raises(
        UserError, match=rf"no port of HOCKET_PORTS \({ports[0]} to {ports[-1]}\) is free: name more"
    ):
        connect(places[2])
    close_all(connect(place_of(2, 3, port)), *(joined.result(10) for joined in joining))


@pytest.mark.parametrize("text", ["", "20000", "20000-", "30000-20000", "0-5", "1-65536", "a-b", "1-2-3"])
def test_what_is_no_range_of_ports(text: str) -> None:
    with pytest.raises(
        UserError, match=re.escape(f"HOCKET_PORTS={text!r} is not a range of ports: write for")
    ):
        parse_ports(text)
    assert parse_ports(" 20000 - 20100") == range(20000, 20101)


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6(threads: ThreadPoolExecutor) -> None:
    with listen(None, 2) as listener, Acceptor(Handshake(place_of(0, 2, 1), b""), listener) as acceptor:
        port = listener.getsockname()[1]
        places = [
            ListeningAddress("a", False, ["::1"], port, TOKEN),
            ListeningAddress("b", False, [], 1, TOKEN),
        ]
        with Handshake(place_of(1, 2, 1), b"").reach(0, places) as rank_1, acceptor.wait()[1] as rank_0:
            assert rank_1.getpeername()[0] == rank_0.getsockname()[0] == "::1"


def test_routes() -> None:
    assert is_near(route_to("127.0.1.1", 1))
    assert is_near(("192.0.2.1", "192.0.2.1"))
    assert not is_near(("192.0.2.1", "192.0.2.2"))
    assert not any(address.startswith(("127.", "::1", "fe80")) for address in host_addresses())
    with pytest.raises(OSError):
        route_to("nobody.invalid", 1)


def test_a_store_that_has_been_stopped_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself waits for it without an end, whatever its timeout."""
    serve = "from hocket.transport.meeting.store import serve_store as s; a = s(); print(a.port, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        entries = StoreEntries(TCPStore("127.0.0.1", int(server.stdout.readline()), wait_for_workers=False))
        entries.set("a", "1")
        assert entries.get(["a"]) == [b"1"]
        monkeypatch.setattr(store, "_ANSWERING_S", 0.2)
        server.send_signal(signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)  # which returns once all of its threads have stopped
        try:
            assert entries.get(["a"]) == []
            assert entries.gone
            entries.set("a", "2")
        finally:
            server.kill()
            for thread in threading.enumerate():
                if thread.name == "hocket asking":
                    thread.join()


class _OutOfDescriptors:
    """A listener in a process that may open no more."""

    def settimeout(self, seconds: float) -> None:
        """Do nothing."""

    def accept(self) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")


def test_a_rank_that_has_no_descriptors_left_says_so_at_once() -> None:
    listener: Any = _OutOfDescriptors()
    with (
        Acceptor(Handshake(place_of(0, 3, 1), b""), listener) as acceptor,
        pytest.raises(
            UserError, match=r"^rank 0 cannot accept other ranks' connections: Too many open files in "
        ),
    ):
        acceptor.wait()
