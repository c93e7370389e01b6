"""What a rank tells the others of itself, and what it knows of them: for reports of stalls, and of deaths."""

from __future__ import annotations

__all__ = ["Status"]


class Status:
    """Notes nothing and knows nothing: there is nobody to ask."""

    def note_waiting(self, what: str, lane: str) -> None:
        """Show the other ranks that this one waits, in `lane` for `what`; a microsecond."""

    def note_computing(self) -> None:
        """Show the other ranks that this one computes again; a microsecond."""

    def note_step(self, step: int) -> None:
        """Show the other ranks how many steps this one has ended; a microsecond."""

    def describe(self) -> str:
        """Say what is known of the other ranks, for a stall report: which computes, waits or is gone."""
        return ""

    def check_lost(self) -> None:
        """Look whether all ranks of the job still live; what waits for no request calls it now and then.

        Raises:
            PeerLostError: one has died; names it.
        """
