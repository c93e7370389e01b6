"""The findings of `hocket doctor`: the lines of its report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """The verdict of a finding."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        verdict: the verdict; a problem keeps something from working.
        subject: the part of the machine.
        text: the state of that part, its meaning and the remedy.
    """

    verdict: Verdict
    subject: str
    text: str

    @classmethod
    def ok(cls, subject: str, text: str) -> Finding:
        """Return a finding that is as it should be."""
        return cls(Verdict.OK, subject, text)

    @classmethod
    def note(cls, subject: str, text: str) -> Finding:
        """Return a finding to know of, which keeps nothing from working."""
        return cls(Verdict.NOTE, subject, text)

    @classmethod
    def problem(cls, subject: str, text: str) -> Finding:
        """Return a finding that keeps something from working."""
        return cls(Verdict.PROBLEM, subject, text)
