"""A job's TCPStore: its opening, and the entries of ranks for each other."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, TypeVarTuple

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from hocket.errors import UserError
from hocket.transport.meeting.islands import telling
from hocket.transport.meeting.rendezvous import Rendezvous
from hocket.transport.status import number_ranks
from hocket.transport.waiting import wait

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: Under this key ranks find a word that two jobs use their store.
CONFLICT = "conflict"

#: Seconds between two looks whether others have come to the store.
LOOK_EVERY_S = 0.2
_REACHING_STORE_S = 5.0
# A name may become known only when its host starts, as those of containers.
_NAMING_S = 30.0
_STARTING_S = 20.0
# A store that runs answers at once.
_ANSWERING_S = 5.0


def serve_store(port: int = 0) -> TCPStore:
    """Run a store for ranks that serve none themselves, on any port for 0; it ends with the object."""
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def open_store(rendezvous: Rendezvous) -> Store:
    """Return the job's store.

    Raises:
        UserError: it cannot be reached, or cannot be opened on the rank that runs it.
    """
    place = (rendezvous.host, rendezvous.port)
    # torch's own attempts print paragraphs, and heed no Ctrl-C.
    _try(rendezvous, "find", lambda: socket.getaddrinfo(*place), min(_NAMING_S, rendezvous.timeout_s))
    if not rendezvous.serves:
        reach = partial(socket.create_connection, place, _REACHING_STORE_S)
        _try(rendezvous, "reach", lambda: reach().close(), rendezvous.timeout_s)
    made: list[TCPStore | Exception] = []
    # On a thread, as torch waits without an end for an answer of what is no store.
    making = threading.Thread(
        target=lambda: made.append(_make(rendezvous)), name="hocket meeting", daemon=True
    )
    making.start()
    making.join(min(rendezvous.timeout_s, _STARTING_S))
    if not made:
        cause = (
            "the program that listens there does not answer as a store: does another program use this port?"
        )
        raise _refusal(rendezvous, "open", cause)
    [store] = made
    if isinstance(store, Exception):
        cause = str(store).splitlines()[0]
        if rendezvous.serves and "EADDRINUSE" in cause:
            warning = threading.Thread(target=_tell_of_conflict, args=(rendezvous,), daemon=True)
            warning.start()
            warning.join(_ANSWERING_S)
            cause = f"address already in use, by another job or program: {rendezvous.of_its_own}"
        raise _refusal(rendezvous, "open", cause) from store
    return PrefixStore(rendezvous.prefix, store)


def _make(rendezvous: Rendezvous) -> TCPStore | Exception:
    try:
        return TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=rendezvous.serves,
            timeout=timedelta(seconds=rendezvous.timeout_s),
            wait_for_workers=False,
            multi_tenant=True,  # a script's own init_process_group may use the same port
        )
    except (RuntimeError, ValueError) as error:
        return error


def _tell_of_conflict(rendezvous: Rendezvous) -> None:
    """Warn the ranks of another job with this port, if there is one, that two jobs may share a store."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):
        socket.create_connection((rendezvous.host, rendezvous.port), LOOK_EVERY_S).close()
        store = TCPStore(
            rendezvous.host,
            rendezvous.port,
            is_master=False,
            timeout=timedelta(seconds=_REACHING_STORE_S),
            wait_for_workers=False,
        )
        PrefixStore(rendezvous.prefix, store).set(CONFLICT, "another rank 0")


def _try(rendezvous: Rendezvous, what: str, call: Callable[[], object], longest_s: float) -> None:
    """Repeat a call until it succeeds.

    Raises:
        UserError: it does not succeed in time.
    """
    end_s = time.monotonic() + longest_s
    fault: OSError | None = None
    tell = telling(
        lambda outcome: (
            f"island {rendezvous.island} cannot {what} the store of island 0 at {rendezvous.host} port "
            f"{rendezvous.port}, {outcome} ({fault}): {rendezvous.how_to_come}"
        )
    )
    while True:
        try:
            call()
        except UnicodeError as error:
            raise _refusal(rendezvous, what, f"this is not a host name: {error}") from error
        except OSError as error:
            fault = error
            if time.monotonic() > end_s:
                first = "rank 0" if rendezvous.islands == 1 else "island 0"
                cause = (
                    f"{error}: does {first} run on that host, and does the network allow connections to "
                    "this port?"
                )
                raise _refusal(rendezvous, what, cause) from error
        else:
            return
        if rendezvous.islands > 1 and rendezvous.place == 0:
            tell()
        time.sleep(LOOK_EVERY_S)


def _refusal(rendezvous: Rendezvous, what: str, cause: str) -> UserError:
    return UserError(
        f"rank {rendezvous.rank} cannot {what} the store at {rendezvous.host} port {rendezvous.port}, where the ranks "
        f"meet: {cause}"
    )


class StoreEntries:
    """The ranks' entries in a store, which is given up when the rank that ran it has ended.

    Args:
        store: all ranks'.

    Attributes:
        gone: whether the store is no longer used, as it does not answer.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._use = threading.Lock()
        self.gone = False

    def set(self, key: str, value: str) -> None:
        """Store a value for the other ranks; microseconds."""
        self._call(self._store.set, key, value)

    def get(self, keys: list[str]) -> list[bytes]:
        """Return stored values, none if the store is gone."""
        return self._ask(self._store.multi_get, keys) or []

    def has(self, key: str) -> bool:
        """Return whether a value is stored."""
        return bool(self._ask(self._store.check, [key]))

    def _ask(self, question: Callable[[list[str]], T], keys: list[str]) -> T | None:
        answers: list[T | None] = []
        if not self.gone:
            # On a thread, as torch waits without an end for a store whose process has been stopped.
            asking = threading.Thread(
                target=lambda: answers.append(self._call(question, keys)), name="hocket asking", daemon=True
            )
            asking.start()
            asking.join(_ANSWERING_S)
            self.gone |= asking.is_alive()
        return None if self.gone or not answers else answers[0]

    def _call(self, call: Callable[[*Ts], T], *arguments: *Ts) -> T | None:
        if self.gone:
            return None
        if not self._use.acquire(timeout=_ANSWERING_S):
            self.gone = True
            return None
        try:
            return call(*arguments)
        except RuntimeError:
            self.gone = True
            return None
        finally:
            self._use.release()


class StoreRanks(StoreEntries):
    """The ranks of a job that exchange values in a store.

    Args:
        store: all ranks'.
        rendezvous: this rank, and the number of ranks.
    """

    def __init__(self, store: Store, rendezvous: Rendezvous) -> None:
        super().__init__(store)
        self._rendezvous = rendezvous
        self._round = 0

    def gather(self, value: object, check: Callable[[], None] = lambda: None) -> list[Any]:
        """Return every rank's `value` (JSON-able), by rank; collective.

        Args:
            value: this rank's.
            check: called between looks; may raise.

        Raises:
            ExchangeTimeoutError: some ranks did not arrive; names them.
        """
        self._round += 1
        keys = [f"{self._round}/{rank}" for rank in range(self._rendezvous.size)]
        self._store.set(keys[self._rendezvous.rank], json.dumps(value))
        # Not the store's own wait, which prints a line when it ends without success, and heeds no Ctrl-C.
        wait(
            lambda: bool(self._store.check(keys)),
            self._rendezvous.timeout_s,
            lambda outcome: f"{self._describe_missing(keys)}: {outcome}",
            check=check,
        )
        return [json.loads(value) for value in self._store.multi_get(keys)]

    def _describe_missing(self, keys: list[str]) -> str:
        place = self._rendezvous
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return (
            f"rank {place.rank} waits for {number_ranks(missing)} of {place.size} to join the job at the store at "
            f"{place.host} port {place.port}"
        )
