"""What befalls a job: `test_event_sequences.py` carries out what a seed draws here."""

from __future__ import annotations

import random
from typing import Any

from event_job import RECIPES, STEPS

SIGNALLED = [(f"SIG{name}", to) for name in ("TERM", "USR1") for to in ("rank", "launcher", "all")]
KILLED = [("SIGKILL", "rank"), ("SIGKILL", "launcher"), ("SIGSEGV", "rank")]
ENDED = [("SIGINT", "launcher"), ("SIGHUP", "launcher")]
ALONE = [("exit", "rank"), ("error", "rank"), ("full disk", "rank"), ("vanish", "rank")]
#: Of scripts alone.
OWN = [("leave", "rank"), ("SIGKILL", "worker")]
#: After these a job goes on.
PAUSED = [("SIGSTOP", "rank"), ("sleep", "rank")]


class Drawn:
    """The sequence that a seed draws.

    Args:
        seed: any.
    """

    def __init__(self, seed: int) -> None:
        draw = self._draw = random.Random(seed)
        self.transport = draw.choice(["torch", "torch", "mpi"])
        self.ranks = draw.randint(2, 3)
        self.program = draw.choice(["script", "script", "run"])
        self.job: dict[str, Any] = {
            "recipe": draw.choice(sorted(RECIPES)),
            "save_every": draw.randint(1, 5),
            "keep": draw.choice([None, 1, 2]),
            "on_signal": draw.random() < 0.7 or self.program == "run",
            "catches": draw.random() < 0.5 and self.program == "script",
            "workers": draw.random() < 0.3 and self.program == "script",
        }
        #: For each attempt but the last, which nothing befalls.
        self.attempts: list[list[dict[str, Any]]] = [[]]
        #: For each what is late: seconds, and whether it is a manifest.
        self.late: dict[int, tuple[float, bool]] = {}
        for number in range(draw.randint(1, 3)):
            if number and draw.random() < 0.8:
                self.attempts.append([])
            self.attempts[-1].append(self._event(number))
        for attempt in range(1, len(self.attempts) + 1):
            if draw.random() < 0.25:
                self.late[attempt] = draw.choice([0.5, 2.0, 8.0]), draw.random() < 0.5
        #: New interpreters take ten times as long, and begin one after another.
        self.forks = seed % 5 != 0
        self.last_is_real = draw.random() < 0.2 or len(self.attempts) in self.late

    def _event(self, number: int) -> dict[str, Any]:
        draw = self._draw
        own = OWN[: 1 + self.job["workers"]] if self.program == "script" else []
        what, to = draw.choice([*SIGNALLED, *KILLED, *KILLED, *ENDED, *ALONE, *ALONE, *own, *PAUSED])
        early = draw.random() < 0.2 and what not in ("full disk", "leave") and to != "worker"
        moments = ["join", "attach"] if self.program == "script" else ["attach"]
        return {
            "number": number,
            "what": what,
            "to": to,
            "rank": draw.randrange(self.ranks),
            "before": draw.choice(moments) if early else None,
            "step": draw.randint(1, STEPS // 2),
            "delay_s": draw.choice([0.0, 0.005, 0.05]),
            "bytes": draw.choice([0, 500, 1500, 2500]),
            "pause_s": draw.choice([0.5, 2.0, 8.0]),
        }

    def __str__(self) -> str:
        return f"{self.program} on {self.ranks} ranks over {self.transport}, {self.job}, {self.attempts}, {self.late}"
