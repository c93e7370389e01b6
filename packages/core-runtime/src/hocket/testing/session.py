"""A session's insides, for tests that look at exchanges and parameters."""

from __future__ import annotations

import hocket
from hocket.session.replica_session import ReplicaSession

__all__ = ["inner_of"]


def inner_of(session: hocket.Session) -> ReplicaSession:
    """Return the engine's session, where every rank holds a whole model."""
    assert isinstance(session.inner, ReplicaSession)
    return session.inner
