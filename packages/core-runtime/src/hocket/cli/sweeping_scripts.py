"""`hocket sweep --script`: a run of the user's own script for each combination of values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hocket.cli.combinations import chosen_values, target_and_overrides
from hocket.cli.sweep_run import OUTPUT, SweepRun
from hocket.cli.sweeping import carry_out_in
from hocket.cli.wanted_ranks import WantedRanks
from hocket.config.source import SLOTS
from hocket.errors import UserError, some
from hocket.own_files import refuse_foreign
from hocket.results import CONFIG, SWEPT_CONFIG
from hocket.results.kept_config import read_config
from hocket.results.script import FILES, STRATEGY
from hocket.strategy.compose import SYNCHRONOUS_STEPS, compose


def sweep_script_command(
    script: str,
    arguments: Sequence[str],
    wanted: WantedRanks,
    out: Path | None,
    jobs: int,
    dry_run: bool = False,
) -> int:
    """Carry out `hocket sweep --script` and return the exit status.

    Args:
        script: the path of the script.
        arguments: keys and their values. `strategy`, keys of a strategy and `synchronous_steps` change the strategy of
            the script's first session; each other key is given to the script as `--KEY VALUE`.
        wanted: the ranks of each run.
        out: the folder for results, if one is named.
        jobs: the number of runs at a time.
        dry_run: list the runs, and start none.

    Raises:
        UserError: a wrong argument or option, or a folder that cannot be used; nothing has been started then.
    """
    if not Path(script).is_file():
        raise UserError(f"there is no file {script}")
    if wanted.size is None:
        raise UserError("the number of ranks is missing: give -n 4, or --hosts a:4,b:4")
    folder = out or Path("sweeps") / Path(script).stem
    runs = [
        _RunOfScript(folder / name, script, chosen, wanted)
        for name, chosen in chosen_values(arguments).items()
    ]
    for run in runs:
        run.check()
    file = Path(script).absolute()
    return carry_out_in(folder, runs, jobs, {file: file.read_bytes()}, dry_run=dry_run)


@dataclass(eq=False)
class _RunOfScript(SweepRun):
    """A run of a script with one combination of values; the script itself loads what it has saved."""

    script: str
    chosen: Mapping[str, str]
    wanted: WantedRanks
    interrupted: ClassVar[str] = "the scripts are stopped; the same command starts the unfinished ones again"

    @property
    def goes_on(self) -> bool:
        return False

    @property
    def ranks(self) -> int:
        return self.wanted.size or 1

    @property
    def _arguments(self) -> dict[str, str]:
        return {key: value for key, value in self.chosen.items() if not _is_of_strategy(key)}

    @property
    def _strategy(self) -> list[str | None]:
        """The recipe, or None for the script's own, and overrides; empty where nothing is changed."""
        overrides = [
            f"{key}={value}"
            for key, value in self.chosen.items()
            if _is_of_strategy(key) and key != "strategy"
        ]
        named = self.chosen.get("strategy")
        if named is None:
            return [None, *overrides] if overrides else []
        recipe, overrides = target_and_overrides(named, overrides, f"strategy={named}")
        return [recipe, *overrides]

    def check(self) -> None:
        """Refuse a strategy that cannot be composed.

        Raises:
            ConfigError, CompositionError, MissingPluginError: as in `hocket.compose`.
        """
        recipe, *overrides = self._strategy or [None]
        if recipe is not None:
            compose(recipe, *(each for each in overrides if each is not None))

    def check_folder(self) -> None:
        refuse_foreign(self.folder, (SWEPT_CONFIG, OUTPUT, *FILES), "--out")
        if not self.has_ended:
            return
        config = read_config(self.folder / CONFIG)
        was = {key: value for key, value in config["task"].items() if key not in ("name", "program")}
        was |= {"ranks": str(config["ranks"]), "seed": str(config["seed"])}
        asked = {"seed": was["seed"], **self._arguments, "ranks": str(self.ranks)}
        differing = [key for key in {**was, **asked} if was.get(key) != asked.get(key)]
        if differing:
            raise UserError(
                f"{self.folder} holds a run with other {some(differing)}: name another folder with --out"
            )

    def prepare(self) -> tuple[list[str], dict[str, str]]:
        words = [word for key, value in self._arguments.items() for word in (f"--{key}", value)]
        ranks = ["-n", str(self.ranks), *self.wanted.words]
        if self.wanted.transport is not None:
            ranks += ["--transport", self.wanted.transport]
        changed = {STRATEGY: json.dumps(self._strategy)} if self._strategy else {}
        return ["launch", *ranks, "--out", str(self.folder), self.script, *words], changed


def _is_of_strategy(key: str) -> bool:
    return key in ("strategy", SYNCHRONOUS_STEPS) or key.partition(".")[0] in SLOTS
