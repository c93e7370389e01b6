"""The format of every trace, checked event by event; the rules are those by which Perfetto reads it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEYS = {
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "b": {"ph", "name", "cat", "id", "pid", "tid", "ts", "args"},
    "e": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
    "s": {"ph", "name", "cat", "id", "pid", "tid", "ts"},
    "f": {"ph", "name", "cat", "id", "pid", "tid", "ts", "bp"},
}
# The times are written in microseconds with three decimals.
_EPSILON_US = 1e-4

Event = dict[str, Any]


@dataclass
class Loaded:
    """A trace that keeps the rules.

    Attributes:
        other: what stands beside the events.
        events: all of them.
        arrows: both ends of each, with the slices that they are bound to.
    """

    other: dict[str, Any]
    events: list[Event]
    arrows: list[tuple[Event, Event]]

    def slices(self, rank: int, cat: str) -> list[Event]:
        """Return a rank's slices of one category, in the order of time."""
        return [e for e in self.events if e["ph"] == "X" and e["cat"] == cat and e["pid"] == rank + 1]

    def exchanges(self, rank: int) -> list[tuple[Event, Event]]:
        """Return the beginnings and ends of a rank's exchanges."""
        ends = {e["id"]: e for e in self.events if e["ph"] == "e"}
        return [(e, ends[e["id"]]) for e in self.events if e["ph"] == "b" and e["pid"] == rank + 1]


def load(path: Path, num_ranks: int) -> Loaded:
    """Read a trace and check it."""
    trace = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    events: list[Event] = trace["traceEvents"]
    for event in events:
        assert event.keys() == _KEYS[event["ph"]], event
        assert event["ts"] >= 0, event
    timed = [event for event in events if event["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    assert {e["pid"] for e in timed} == set(range(1, num_ranks + 1))
    named = {e["pid"]: e["args"]["name"] for e in events if (e["ph"], e["name"]) == ("M", "process_name")}
    assert named == {rank + 1: f"rank {rank}" for rank in range(num_ranks)}
    threads = {e["tid"] for e in events if (e["ph"], e["name"]) == ("M", "thread_name")}
    assert {e["tid"] for e in timed} <= threads
    slices = _check_nesting(timed)
    _check_exchanges(timed)
    _check_counters(timed)
    return Loaded(trace["otherData"], events, _check_arrows(timed, slices))


def _check_nesting(events: list[Event]) -> dict[int, list[Event]]:
    """Each slice lies within the one that is open when it begins; return them by thread."""
    slices: dict[int, list[Event]] = defaultdict(list)
    opened: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        assert event["dur"] > 0, event
        slices[event["tid"]].append(event)
        ends = opened[event["tid"]]
        while ends and ends[-1] <= event["ts"] + _EPSILON_US:
            ends.pop()
        end = event["ts"] + event["dur"]
        assert not ends or end <= ends[-1] + _EPSILON_US, event
        ends.append(end)
    return slices


def _check_exchanges(events: list[Event]) -> None:
    """Each begins once and ends once, later."""
    begun: dict[str, Event] = {}
    ended = set()
    for event in events:
        if event["ph"] == "b":
            assert event["id"] not in begun, event
            begun[event["id"]] = event
        elif event["ph"] == "e":
            assert event["id"] not in ended, event
            begin = begun[event["id"]]
            assert (begin["name"], begin["cat"], begin["pid"]) == (event["name"], event["cat"], event["pid"])
            ended.add(event["id"])
    assert ended == begun.keys()


def _check_counters(events: list[Event]) -> None:
    """Nothing is under way at the end, and never less than nothing."""
    last = {}
    for event in events:
        if event["ph"] == "C":
            [value] = event["args"].values()
            assert value >= 0, event
            last[event["pid"]] = value
    assert all(value == 0 for value in last.values())


def _check_arrows(events: list[Event], slices: dict[int, list[Event]]) -> list[tuple[Event, Event]]:
    """Each goes from within a send to within the receive of the same message, and not back in time."""
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == sum(e["ph"] == "s" for e in events)
    assert len(ends) == sum(e["ph"] == "f" for e in events)
    assert starts.keys() == ends.keys()
    arrows = []
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        send, receive = _enclosing(start, slices), _enclosing(end, slices)
        assert (send["cat"], receive["cat"]) == ("send", "receive")
        assert send["args"]["round"] == receive["args"]["round"]
        assert send["args"]["bytes"] == receive["args"]["bytes"]
        lane = receive["name"].removeprefix("receive ").rpartition(" from ")[0]
        assert send["name"] == f"send {lane} to {receive['pid'] - 1}"
        assert receive["name"] == f"receive {lane} from {send['pid'] - 1}"
        arrows.append((send, receive))
    return arrows


def _enclosing(event: Event, slices: dict[int, list[Event]]) -> Event:
    time = event["ts"] + _EPSILON_US
    [found] = [s for s in slices[event["tid"]] if s["ts"] <= time < s["ts"] + s["dur"]]
    return found
