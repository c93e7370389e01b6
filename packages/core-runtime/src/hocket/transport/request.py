"""The future of an operation on a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, overload

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with defaults, as Python's own has them from 3.13 on

    T_co = TypeVar("T_co", covariant=True, default=object)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)

T = TypeVar("T")
U = TypeVar("U")

#: The end of a message about ranks that make different calls: likely causes.
RANKS_DIVERGED = (
    "did a rank leave its loop early, skip a step, or begin with another model, data or strategy?"
)


class Request(ABC, Generic[T_co]):
    """The future of an asynchronous operation, `Request[T]` of one with a result of type T."""

    @abstractmethod
    def done(self) -> bool:
        """Advance the transport and return whether the operation has finished. Never blocks.

        Raises:
            TransportError: the operation failed.
        """

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> T_co:
        """Block until the operation has finished, without burning a core, and return `result`.

        Of lanes on a device only the current stream waits: this returns when the operation has begun.

        Args:
            timeout_s: seconds to wait at most; the peer's own `timeout_s` where None.

        Raises:
            ExchangeTimeoutError: not finished in time; names this rank, the lane and the ranks it waited for.
            TransportError: the operation failed.
        """

    @property
    def result(self) -> T_co:
        """Return the operation's result, once it is done; None for plain messages."""
        return None  # type: ignore[return-value]  # where it is a plain message's

    def withdraw(self) -> None:
        """Give up a receive without a message so far; its buffer is the caller's again. Never blocks.

        A message that arrives later is lost, or goes to a later receive for the same round.

        Raises:
            TypeError: this is no receive.
        """
        raise TypeError(f"{type(self).__name__}: only a receive can be withdrawn: wait for this request")

    def then(self, act: Callable[[T_co], Request[U] | U]) -> Request[U]:
        """Return a request that is done once this one is and `act` has been called with its result.

        `act` runs in the thread that finds this one done, and returns the new request's result. If that is another
        request, the new one is done once that is, and has its result; if it raises, so does whoever asks for the end.
        Use only the new request from now on.
        """
        return _Then(self, act)

    @staticmethod
    def all_of(requests: Iterable[Request[T]]) -> Request[list[T]]:
        """Return a request that is done once all of these are; its result is the list of theirs.

        Its `wait` waits for each in turn, for up to `timeout_s` each.
        """
        return _All(requests)


class Finished(Request[T_co]):
    """A request that is done from the beginning.

    Args:
        result: its result.
    """

    __slots__ = ("_result",)

    @overload
    def __init__(self: Finished[None]) -> None: ...

    @overload
    def __init__(self, result: T_co) -> None: ...

    def __init__(self, result: Any = None) -> None:
        self._result: T_co = result

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> T_co:
        return self._result

    @property
    def result(self) -> T_co:
        return self._result


class FunctionRequest(Request[T_co]):
    """A request made of functions, which look and wait elsewhere.

    Args:
        done: see `Request.done`.
        wait: blocks until it is done, given `timeout_s`.
        result: returns the operation's result, once it is done.
        withdraw: see `Request.withdraw`; for a receive.
    """

    __slots__ = ("_done", "_result", "_wait", "_withdraw")

    def __init__(
        self,
        done: Callable[[], bool],
        wait: Callable[[float | None], object],
        result: Callable[[], T_co] = lambda: None,  # type: ignore[assignment, return-value]
        withdraw: Callable[[], object] | None = None,
    ) -> None:
        self._done, self._wait, self._result, self._withdraw = done, wait, result, withdraw

    def done(self) -> bool:
        return self._done()

    def wait(self, timeout_s: float | None = None) -> T_co:
        self._wait(timeout_s)
        return self._result()

    @property
    def result(self) -> T_co:
        return self._result()

    def withdraw(self) -> None:
        if self._withdraw is None:
            super().withdraw()
        else:
            self._withdraw()


class _Then(Request[T_co]):
    __slots__ = ("_act", "_held", "_result")

    def __init__(self, held: Request[T], act: Callable[[T], Request[T_co] | T_co]) -> None:
        self._held: Request[Any] | None = held
        self._act: Callable[[Any], object] = act
        self._result: Any = None

    def done(self) -> bool:
        held = self._held
        if (
            held is not None and held.done() and self._held is held
        ):  # else a look within it has found this done
            self._finish(held.result)
        return self._held is None

    def wait(self, timeout_s: float | None = None) -> T_co:
        while (held := self._held) is not None:
            given = held.wait(timeout_s)
            if self._held is held:  # what the wait advanced besides may have found this done, too
                self._finish(given)
        result: T_co = self._result
        return result

    def _finish(self, given: object) -> None:
        held, self._held = self._held, None
        try:
            result = self._act(given)
        except Exception as error:
            self._held, self._act = held, partial(_fail, error)  # for whoever asks again
            raise
        if isinstance(result, Request):
            self._held, self._act = result, _itself
        else:
            self._result = result

    @property
    def result(self) -> T_co:
        result: T_co = self._result
        return result

    def withdraw(self) -> None:
        if self._held is not None:
            self._held.withdraw()


def _itself(given: T) -> T:
    return given


def _fail(error: Exception, given: object) -> object:
    raise error


class _All(Request[list[T]]):
    __slots__ = ("_left", "_requests")

    def __init__(self, requests: Iterable[Request[T]]) -> None:
        self._requests = list(requests)
        self._left = self._requests

    def done(self) -> bool:
        self._left = [request for request in self._left if not request.done()]
        return not self._left

    def wait(self, timeout_s: float | None = None) -> list[T]:
        for request in self._left:
            request.wait(timeout_s)
        self._left = []
        return self.result

    @property
    def result(self) -> list[T]:
        return [request.result for request in self._requests]

    def withdraw(self) -> None:
        for request in reversed(self._left):
            request.withdraw()
