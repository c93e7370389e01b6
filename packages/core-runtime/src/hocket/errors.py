"""Every error that Hocket raises on purpose, so that a caller can tell them apart.

A `UserError` is a mistake that the reader can fix by the message alone: the command line prints it without a
traceback and exits with status 2. The others end a run with status 1.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence

__all__ = [
    "AttachError",
    "CheckpointError",
    "CompositionError",
    "ConfigError",
    "DamagedError",
    "DeadlockError",
    "DisagreementError",
    "ExchangeTimeoutError",
    "HocketError",
    "MissingFileError",
    "MissingPluginError",
    "NonFiniteElsewhereError",
    "NonFiniteError",
    "PeerLostError",
    "RankKilledError",
    "ReplacedError",
    "SessionError",
    "SessionLeftError",
    "TransportError",
    "UserError",
    "WriteError",
    "did_you_mean",
    "near_words",
    "reason",
    "shortened",
    "some",
    "suggest",
]


class HocketError(Exception):
    """Anything that Hocket raises on purpose."""


class UserError(HocketError):
    """A mistake in what the user wrote or asked for; the message says what to change."""


class ConfigError(UserError):
    """A key, a type or a value that the configuration does not allow.

    Attributes:
        unknown: the path from the root to a key that is not allowed at its place, and is no misspelling of one that
            is; empty for other mistakes.
    """

    unknown: tuple[str | int, ...] = ()


class CompositionError(ConfigError):
    """A combination of existing parts that has no meaning."""


class MissingPluginError(ConfigError):
    """A component of a plugin that is not installed, does not load or does not fit this core."""


class AttachError(UserError):
    """A model or an optimizer that a session cannot carry.

    Attributes:
        override: `KEY=VALUE` with which it could; empty if there is none.
    """

    def __init__(self, message: str, override: str = "") -> None:
        super().__init__(message)
        self.override = override


class DisagreementError(UserError):
    """A difference between the configurations, versions or models that ranks were started with."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written or read, or does not fit the run or session that loads it."""


class DamagedError(CheckpointError):
    """A checkpoint that has changed since it was written; `session.load` takes the newest one before it."""


class MissingFileError(DamagedError):
    """A file of a checkpoint that is not there, or not whole; on a shared disk it may come late."""


class ReplacedError(UserError):
    """A parameter that was replaced under an attached session and cannot be taken over."""


class SessionError(UserError):
    """A call that the session's state does not allow: it is closed, broken by an error, or within `consensus`."""


class WriteError(HocketError):
    """A file of a run's results that the system cannot write, most often because the disk is full."""


class NonFiniteError(HocketError):
    """NaN or Inf in data about to be sent."""


class NonFiniteElsewhereError(NonFiniteError):
    """NaN or Inf in data from another rank, whose own error says more."""


class TransportError(HocketError):
    """A failed operation of the transport."""


class ExchangeTimeoutError(TransportError):
    """An exchange that did not finish in time; the message says which rank waited for which."""


class DeadlockError(ExchangeTimeoutError):
    """A deadlock of virtual ranks: all wait, and nothing under way could wake one."""


class PeerLostError(TransportError):
    """A rank that has died or left while others still need it."""


class SessionLeftError(PeerLostError):
    """A session that another rank has left because of an error of its own."""


class RankKilledError(BaseException):
    """The end of a virtual rank that a fault has killed; no `except Exception` keeps it alive."""


def suggest(given: str, allowed: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the allowed word nearest to `given`, or an empty string."""
    return did_you_mean(near_words(given, allowed)[:1])


def near_words(given: str, allowed: Iterable[str]) -> list[str]:
    """Return up to three allowed words that are near to `given`, the nearest first."""
    words = list(allowed)
    near = difflib.get_close_matches(given, words, n=3, cutoff=0.6)
    if not near:  # bandwidth stands for bandwidth_bits_per_s
        length = given.count("_") + 1
        shortened = {"_".join(word.split("_")[:length]): word for word in reversed(words)}
        near = [shortened[each] for each in difflib.get_close_matches(given, shortened, n=3, cutoff=0.6)]
    # Letters in another order are the likelier slip: sdg means sgd rather than sgp.
    return sorted(near, key=lambda word: sorted(word) != sorted(given))


def did_you_mean(words: Sequence[str]) -> str:
    """Return `" Did you mean 'x' or 'y'?"`, or an empty string."""
    *others, last = map(repr, words) if words else [""]
    return f" Did you mean {', '.join(others)}{' or ' * bool(others)}{last}?" if words else ""


def allowed_words(allowed: str, guess: str = "") -> str:
    """Return the ending of a refusal that lists what is allowed: after the guess from `suggest`, if there is one."""
    return f".{guess} Allowed: {allowed}" if guess else f"; allowed: {allowed}"


def shortened(text: str, most: int = 100) -> str:
    """Return a text, or its beginning if it has more than `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def reason(error: OSError) -> str:
    """Return the system's text for an error, or that a link leads nowhere."""
    path = error.filename
    if isinstance(path, str) and os.path.islink(path) and not os.path.exists(path):
        return f"it is a link to {os.readlink(path)}, which is not there"
    return error.strerror or str(error) or type(error).__name__


def some(names: Sequence[str]) -> str:
    """Return the first few of `names`, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
