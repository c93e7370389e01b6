"""What `hocket doctor` finds: a line of its report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Verdict"]


class Verdict(StrEnum):
    """How good a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: whether it keeps anything from working.
        subject: what was looked at.
        text: what was found, what it means and what to do about it.
    """

    verdict: Verdict
    subject: str
    text: str

    @classmethod
    def ok(cls, subject: str, text: str) -> Finding:
        """Return what is as it should be."""
        return cls(Verdict.OK, subject, text)

    @classmethod
    def note(cls, subject: str, text: str) -> Finding:
        """Return what should be known, and keeps nothing from working."""
        return cls(Verdict.NOTE, subject, text)

    @classmethod
    def problem(cls, subject: str, text: str) -> Finding:
        """Return what keeps something from working."""
        return cls(Verdict.PROBLEM, subject, text)
