"""What a user asks `hocket recommend`: which model, on which hosts and network, and how long and late ranks compute."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hocket.cli.planning import model_of
from hocket.cli.recommend_options import Asked
from hocket.config.source import based_on
from hocket.delays import RandomSubset
from hocket.errors import UserError
from hocket.plugin import Registry, default_registry
from hocket.strategy.scope import Placement
from hocket.task.user import call_user_function, load_user_object
from hocket.training import CONFIG, METRICS
from hocket.training.run import RunConfig, load_run
from hocket.transport.hosts import parse_hosts

if TYPE_CHECKING:
    from torch import nn

    from hocket.delays import Delays

__all__ = [
    "MATRICES",
    "bandwidth_of",
    "base_of",
    "based_on_asked",
    "delays_among",
    "delays_of",
    "model_asked",
    "placement_of",
    "step_seconds",
]

_STEPS_MEASURED = 30
#: A model of which nobody knows more than its parameters is taken for so many equal matrices.
MATRICES = 24

_NUMBER = r"(\d+(?:\.\d+)?)"
_COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def base_of(asked: Asked, registry: Registry) -> RunConfig:
    """Read what is to be trained, with plain allreduce for a strategy."""
    from hocket.cli.checking import check_run

    overrides = [*asked.overrides]
    if asked.optimizer is not None:
        overrides.append(f"optimizer={asked.optimizer}")
    if asked.bandwidth is not None:
        overrides.append(f"network.bandwidth_bytes_per_s={bandwidth_of(asked.bandwidth)!r}")
    if asked.latency is not None:
        overrides.append(f"network.latency_s={_seconds(asked.latency)!r}")
    base = load_run(based_on_asked(asked, "sgd", registry), overrides, registry=registry)
    check_run(base)
    return base if asked.late is None else replace(base, delays=delays_of(asked.late))


def based_on_asked(asked: Asked, recipe: str, registry: Registry) -> Any:
    if asked.target is None:
        return recipe
    file = asked.target / CONFIG if asked.target.is_dir() else asked.target
    if not file.is_file():
        raise UserError(f"{asked.target}: neither a YAML file nor the folder of a run ({CONFIG} is missing)")
    return based_on(str(file), recipe, registry)


def placement_of(asked: Asked, base: RunConfig) -> Placement:
    if asked.hosts is not None:
        hosts = parse_hosts(asked.hosts)
        placement = Placement.of_counts([host.ranks for host in hosts])
    elif base.ranks is not None:
        placement = Placement(tuple(range(base.ranks)))
    else:
        raise UserError("--hosts is missing: on which hosts the ranks are, for instance 8x1: 8 hosts of 1")
    if placement.size < 2:
        raise UserError("--hosts: a single rank exchanges nothing: name two or more")
    return placement


def model_asked(asked: Asked, base: RunConfig) -> nn.Module:
    import torch
    from torch import nn

    if asked.params is not None and asked.model is not None:
        raise UserError("--params and --model both say what the model is: leave one out")
    if asked.params is not None:
        width = max(1, round((_count(asked.params) / MATRICES) ** 0.5))
        with torch.device("meta"):
            return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(MATRICES)))
    if asked.model is not None:
        build = load_user_object(asked.model, "--model")
        built = call_user_function(build, asked.model, "--model")
        if not isinstance(built, nn.Module):
            raise UserError(f"--model: {asked.model} returned {type(built).__name__}, no torch.nn.Module")
        return built
    if not asked.names_task:
        raise UserError(
            "which model is missing: --params 25M, --model module:function, task=NAME, or a run's folder"
        )
    from hocket.cli.checking import check_run

    return model_of(check_run(base))


def step_seconds(asked: Asked, base: RunConfig) -> float:
    """Return how long a step computes: as told, as the run says, or measured."""
    if asked.step_s is not None:
        return asked.step_s
    if base.compute.step_s:
        return base.compute.step_s
    if not (asked.measure and asked.names_task):
        raise UserError(
            "--step is missing: the seconds that a step computes; with a task and --measure it is measured here"
        )
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        given = [
            f"steps={_STEPS_MEASURED}",
            "log_every=1",
            "eval_every=null",
            "checkpoint={}",
            "delays=null",
            "ranks=1",
        ]
        command = [sys.executable, "-m", "hocket", "run", *_target_words(asked, folder), *given, "-q"]
        told = subprocess.run(
            [*command, "-n", "1", "--out", str(out)], check=False, capture_output=True, text=True
        )
        if told.returncode:
            raise UserError(f"--measure: a step cannot be measured: {told.stderr.strip()}")
        rows = [json.loads(line) for line in (out / METRICS).read_text().splitlines()]
    taken = [later["seconds"] - before["seconds"] for before, later in pairwise(rows)]
    return float(median(taken))


def _target_words(asked: Asked, folder: str) -> list[str]:
    if asked.target is None:
        return ["local", *asked.overrides]
    import yaml

    file = Path(folder) / "measured.yaml"
    file.write_text(yaml.safe_dump(based_on_asked(asked, "local", default_registry())))
    return [str(file), *asked.overrides]


def delays_among(base: RunConfig, placement: Placement) -> Delays | None:
    if base.delays is not None:
        try:
            base.delays.check_size(placement.size)
        except ValueError as error:
            raise UserError(f"--late among {placement.size} ranks: {error}") from error
    return base.delays


def _count(text: str) -> float:
    found = re.fullmatch(_NUMBER + "([kKmMbBgG]?)", text)
    if found is None or float(found[1]) == 0:
        raise UserError(f"--params: got {text!r}; allowed: a number such as 25M or 1.3B")
    return float(found[1]) * _COUNTS[found[2].lower()]


def bandwidth_of(text: str) -> float:
    """Return the bytes a second that a text such as 1gbit means.

    Raises:
        UserError: it means none.
    """
    found = re.fullmatch(_NUMBER + r"\s*([kKmMgGtT]bit)(?:/s)?", text)
    if found is None or float(found[1]) == 0:
        raise UserError(
            f"--bandwidth: got {text!r}; allowed: a number with kbit, mbit, gbit or tbit, such as 1gbit"
        )
    return float(found[1]) * _BITS[found[2].lower()] / 8


def _seconds(text: str) -> float:
    found = re.fullmatch(_NUMBER + r"\s*(s|ms|us)", text)
    if found is None:
        raise UserError(f"--latency: got {text!r}; allowed: a number with s, ms or us, such as 50us")
    return float(found[1]) * _SECONDS[found[2]]


def delays_of(text: str) -> Delays:
    """Return the delays that a text such as 1x0.3, or a mapping of `delays`, means.

    Raises:
        UserError: it means none.
    """
    if text.lstrip().startswith("{"):
        delays = load_run("sgd", [f"delays={text}"]).delays
        assert delays is not None
        return delays
    found = re.fullmatch(r"(\d+)x" + _NUMBER, text)
    if found is None:
        raise UserError(
            f"--late: got {text!r}; allowed: 1x0.3 (one rank, another in each step, is late by 0.3 s), or delays such "
            "as {name: fixed, ranks: [0], seconds: 0.3}"
        )
    return RandomSubset(int(found[1]), float(found[2]))
