"""A script's run: a line at its beginning and its end, and the folder of its results."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hocket.config.source import Target
from hocket.disk import path_of
from hocket.errors import HocketError
from hocket.launch.joining import launched
from hocket.plain import Tree
from hocket.plan.plan import plan
from hocket.quantities import format_bytes, format_seconds
from hocket.results import METRICS, TRACE_FILE
from hocket.results.files import Results, write_summary
from hocket.results.folder import prepared
from hocket.results.history import read_rows
from hocket.results.provenance import describe_start
from hocket.results.script import FILES, OUT, OWN_KEYS, SCRIPT, START, STRATEGY, TRACE, check_folder
from hocket.session.engine_session import EngineSession
from hocket.session.figures import figures_of
from hocket.strategy.compose import compose
from hocket.strategy.scope import Placement
from hocket.strategy.strategy import Strategy
from hocket.trace import Observer, Trace
from hocket.transport.network import NetworkModel

_log = logging.getLogger("hocket")

_sessions = itertools.count()


@dataclass(frozen=True)
class ScriptRequest:
    """The requests of a user, of `hocket launch` and of `hocket sweep` to a session of a script.

    Attributes:
        folder: the folder of the results; None for none.
        traced: whether to write a trace there.
        strategy: a recipe, or None for the script's own strategy, and overrides; empty to change nothing.
    """

    folder: Path | None
    traced: bool
    strategy: Sequence[str | None]

    @classmethod
    def of(cls, out: str | os.PathLike[str] | None) -> ScriptRequest:
        """Return the requests to a session that begins; those of the commands go to a process's first one.

        Args:
            out: the folder that the script names; None for that of the command.
        """
        environment = os.environ if next(_sessions) == 0 else {}
        folder = environment.get(OUT) if out is None else out
        if folder is None and OUT in os.environ:
            _log.warning(
                "only the first session of a script writes results: for another one give attach(..., out=FOLDER)"
            )
        return cls(
            None if folder is None else path_of(folder, "out"),
            TRACE in environment,
            json.loads(environment.get(STRATEGY, "[]")),
        )

    def choose(self, own: Strategy | Target) -> Strategy:
        """Return the strategy of the session.

        Raises:
            ConfigError, CompositionError, MissingPluginError: as in `hocket.compose`.
        """
        if self.strategy:
            recipe, *overrides = self.strategy
            return compose(
                own if recipe is None else recipe, *(each for each in overrides if each is not None)
            )
        return own if isinstance(own, Strategy) else compose(own)

    def observer(self, own: Observer | None) -> Observer | None:
        """Return the script's observer, or a trace where that is asked for."""
        if own is None and self.traced and self.folder is not None:
            return Trace(self.folder / TRACE_FILE)
        return own


def is_script() -> bool:
    """Return whether a launcher has started this process with a program that is no command of Hocket's."""
    return launched() is not None and "hocket.cli" not in sys.modules


class ScriptRun:
    """The account of a script's session, from attach to close.

    Args:
        session: the engine's session.
        folder: the folder of the results; None for none, and for the two lines alone.
        hosts: the names of the ranks' hosts, by rank.

    Attributes:
        folder: the folder of the results; None for none.
    """

    def __init__(self, session: EngineSession, folder: Path | None, hosts: Sequence[str]) -> None:
        self._session = session
        self._since_s = session.peer.clock.now()
        self._closing = contextlib.ExitStack()
        self._results: Results | None = None
        self._last_row: Tree = {}
        #: The newest value of each name that the script has written.
        self._newest: Tree = {}
        #: The steps, the waits and the bytes before the seconds that are counted.
        self._first_step, self._first_waited_s, self._first_sent = 0, 0.0, 0.0
        self.folder = folder
        if session.is_main:
            if folder is not None:
                start = json.loads(os.environ[START]) if START in os.environ else describe_start()
                config = _config_of(session)
                self._closing.enter_context(
                    prepared(folder, f"out {folder}", FILES, config, start, lambda: check_folder(folder))
                )
                self._results = Results(folder, hosts, owned=FILES)
                self._closing.callback(self._results.close)
            _say(_first_line(session, hosts))

    def resume_after(self, step: int) -> None:
        """Keep the rows up to a step that a checkpoint has restored, and count their seconds, too."""
        counters = self._session.counters
        self._first_step, self._first_sent = step, counters.bytes_sent
        self._first_waited_s = counters.exposed_wait_s
        self._last_row = {"exposed_wait_s": self._first_waited_s}
        if self._results is None or self.folder is None:
            return
        self._results.resume_after(step)
        path = self.folder / METRICS
        kept = [row for row in read_rows(path) if row["step"] <= step] if path.exists() else []
        if kept:
            self._last_row = dict(kept[-1])
            for row in kept:
                self._newest |= {name: v for name, v in row.items() if name not in OWN_KEYS}
            self._since_s -= kept[-1]["seconds"]
            self._first_step = 0

    def write(self, values: Mapping[str, Any]) -> None:
        """Write a row of rank 0: its values, and this rank's seconds, bytes and waits so far."""
        if self._results is None:
            return
        seconds, counters = self._seconds, self._session.counters
        passed_s = seconds - self._last_row.get("seconds", 0.0)
        waited_s = counters.exposed_wait_s - self._last_row.get("exposed_wait_s", 0.0)
        row = {
            "step": self._session.step,
            "seconds": seconds,
            "bytes_sent": counters.bytes_sent,
            "exposed_wait_s": counters.exposed_wait_s,
            "wait_share": waited_s / passed_s if passed_s > 0 else None,
            **values,
        }
        self._results.begin()
        self._results.write(row)
        self._last_row = row
        self._newest |= values

    def end(self) -> None:
        """Print the last line and write the summary; collective."""
        session = self._session
        call = "the session's end"
        every = session.gathered([self._seconds, self._first_step], call)
        seconds, first_step = max(own for own, _ in every), every[0][1]  # rank 0 knows of earlier rows
        before_s, sent_before = (self._first_waited_s, self._first_sent) if first_step else (0.0, 0.0)
        waited_s = session.counters.exposed_wait_s - before_s
        figures = figures_of(
            session, seconds, waited_s, first_step=first_step, sent_before=sent_before, call=call
        )
        if session.is_main:
            _say(_last_line(figures, session.step - first_step))
            if self._results is not None and self.folder is not None:
                if self._last_row.get("step") != session.step:
                    self.write({})
                of_script = {"task": SCRIPT, "parameters": _num_parameters(session)}
                write_summary(self.folder, {**figures, **of_script, **self._newest})
        self.close()

    def close(self) -> None:
        """Close the files; a run without a summary has not ended."""
        self._closing.close()

    @property
    def _seconds(self) -> float:
        return self._session.peer.clock.now() - self._since_s


def _say(line: str) -> None:
    print(f"Hocket: {line}", file=sys.stderr, flush=True)  # problems begin with hocket:


def _num_parameters(session: EngineSession) -> int:
    return sum(each.numel() for each in session.model.parameters())


def _first_line(session: EngineSession, hosts: Sequence[str]) -> str:
    """Return a sentence on the strategy, the ranks and what they send."""
    parameters = _num_parameters(session)
    name = session.strategy.name or "own strategy"
    if session.size == 1:
        return f"{name} on one rank, which exchanges with no other; {parameters:,} parameters"
    num_hosts = len(set(hosts))
    ranks = f"{session.size} ranks over {session.peer.transport}"
    ranks += f" ({num_hosts} hosts)" if num_hosts > 1 else ""
    ranks += f", {session.island.described}" if session.island.described else ""
    starts = [f"from step {phase.step} on " for phase in session.strategy.phases]
    phases = [
        f"{start}{_rhythm(phase.strategy)}{_volume(session, phase.strategy, hosts)}"
        for start, phase in zip(["", *starts], session.strategy.in_phases, strict=False)
    ]
    return f"{name} on {ranks}, {parameters:,} parameters: {'; '.join(phases)}"


def _rhythm(strategy: Strategy) -> str:
    """Return the steps in which a strategy exchanges, in words."""
    periods = [1] * len(strategy.gradients) + [each.every for each in strategy.parameters]
    words = dict.fromkeys("in each step" if each == 1 else f"every {each} steps" for each in periods)
    return " and ".join(words) or "nothing is sent"


def _volume(session: EngineSession, strategy: Strategy, hosts: Sequence[str]) -> str:
    """Return the bytes that a rank sends, in words; nothing where ranks hold parts of the model."""
    if session.data_size < session.size or session.island.places or not strategy.exchanges:
        return ""
    try:
        planned = plan(strategy, session.model, Placement.of(hosts), NetworkModel())
    except HocketError:  # what is at fault is told where the exchanges are opened
        return ""
    return f", {format_bytes(planned.bytes_per_step)} per rank and step on average"


def _last_line(figures: Mapping[str, Any], steps: int) -> str:
    """Return a sentence on the steps that were timed, their time, and its parts."""
    seconds = figures["seconds"]
    line = f"{steps:,} step{'s' * (steps != 1)} in {format_seconds(seconds)}"
    if steps:
        line += f": {format_seconds(seconds / steps)} a step"
        if figures["ranks"] > 1 and figures["exposed_wait_fraction"] is not None:
            waiting = figures["exposed_wait_fraction"]
            line += (
                f", {100 * (1 - waiting):.0f} % computing and {100 * waiting:.0f} % waiting for other ranks"
            )
            line += f", {format_bytes(figures['bytes_sent_per_step'])} sent per rank and step"
    return line


def _config_of(session: EngineSession) -> Tree:
    """Return a script's run as the configuration of a run's folder."""
    plain = session.strategy.resolved()
    name, phases = plain.pop("name"), plain.pop("phases")
    arguments, seed = _arguments(sys.argv[1:])
    group = session.optimizers.param_groups[0]
    settings = {key: value for key, value in group.items() if isinstance(value, bool | int | float | None)}
    return {
        "name": name,
        "task": {"name": SCRIPT, "program": os.path.relpath(sys.argv[0]), **arguments},
        "optimizer": {"name": session.optimizers.kind.lower(), **settings},
        "seed": torch.initial_seed() if seed is None else seed,
        "ranks": session.size,
        "transport": session.peer.transport,
        "strategy": plain,
        "phases": phases,
    }


def _arguments(words: Sequence[str]) -> tuple[dict[str, str], int | None]:
    """Return a script's arguments by name, and the seed among them; None if there is none."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, equals, value = word.lstrip("-").partition("=")
        if not equals and word.startswith("-"):
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
        elif not equals:
            key, value = f"argument {len(found) + 1}", word
        found[key] = value
    seed = found.pop("seed", "")
    return found, int(seed) if seed.isdecimal() else None
