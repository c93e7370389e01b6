"""Measures what each mechanism that exists for speed alone gains a recipe: steps with it, and with its alternative.

    tools/mechanisms [--ranks 2 4 8] [--pairs 3] [WORD ...]     those that have a word in their name, or all
    tools/mechanisms --list

A pair is a turn of steps with the mechanism and a turn without, in this order and then in the other. Each turn attaches
a new session to a new model, so that memory lies elsewhere each time; both train the same from the same start, and must
end with the same weights. The turns of a mechanism take place in one job, in which what replaces the mechanism is put
in place for a turn (`replacements.py`); what only a new process sees has a job for each turn.

A cell is by how much longer a step is without the mechanism, in per cent of the step with it: the median of the pairs,
and the smallest and the largest. The time of a turn is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mechanism_list import MECHANISMS, Case, Mechanism, Model, Where

from hocket.launch.launching import launch
from hocket.launch.mpiexec import find_mpiexec
from hocket.launch.rank_process import ALLOCATOR
from hocket.transport.peer import gather

if TYPE_CHECKING:
    from torch import nn

    from hocket.transport.peer import Peer

NETLAB = Path(__file__).parents[3] / "tools/netlab"
SLOW_LINK = "100mbit"
WITH, WITHOUT = "with", "without"
WARM_UP, FEWEST_STEPS, MOST_STEPS = 2, 3, 300
#: For one layer; so large that a step more or less is seen in the weights.
LEARNING_RATE = 0.2
SAMPLE = 4096
#: The exit status of a job that SIGHUP, SIGINT or SIGTERM ends, which end this script, too.
_ASKED_TO_END = (129, 130, 143)
#: The sum of several ranks may be rounded in another order; a step more or less is a hundredth of the way.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Turn:
    """What a turn took, and where it ended.

    Attributes:
        seconds: of a step.
        steps: how many.
        digests: of the weights, by rank.
        start, end: some of rank 0's weights.
    """

    seconds: float
    steps: int
    digests: list[str]
    start: list[float]
    end: list[float]


@dataclass(frozen=True)
class Order:
    """What the ranks of a job are asked for.

    Attributes:
        mechanism: its name.
        case: which of its cases.
        sides: of the turns.
        ranks: how many.
        seconds: that a turn should take.
        steps: of each turn; 0 to find out how many take so long.
        out: the file for what the turns took.
    """

    mechanism: str
    case: int
    sides: list[str]
    ranks: int
    seconds: float
    steps: int
    out: str


class DifferentError(Exception):
    """The alternative does not do the same work."""


# ---------------------------------------------------------------------------------------------------- on the ranks


def rank(order: Order) -> None:
    """Make a job's turns, as one of its ranks."""
    import torch

    import hocket
    from hocket.training.startup import defer_dynamo

    defer_dynamo()  # as the ranks of `hocket run` do
    torch.set_num_threads(1)
    mechanism = _named(order.mechanism)
    case = mechanism.cases[order.case]
    peer = None if case.where is Where.VIRTUAL else hocket.join()

    def turn(side: str, steps: int) -> Turn:
        replaces = side == WITHOUT and not mechanism.apart
        with mechanism.without() if replaces else nullcontext():
            if peer is not None:
                return take_turn(peer, case, steps)
            world = hocket.virtual(order.ranks)
            return world.run(lambda: take_turn(hocket.join(), case, steps))[0]

    steps = order.steps
    if not steps:
        steps = min(max(round(order.seconds / turn(WITH, FEWEST_STEPS).seconds), FEWEST_STEPS), MOST_STEPS)
        steps = gather(peer, steps)[0] if peer is not None else steps
    turns = [asdict(turn(side, steps)) for side in order.sides]
    if peer is None or peer.rank == 0:
        Path(order.out).write_text(json.dumps(turns))
    if peer is not None:
        peer.close()


def take_turn(peer: Peer, case: Case, steps: int) -> Turn:
    """Train so many steps in a session of their own; collective."""
    import torch

    import hocket

    gc.collect()
    model = make_model(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / case.model.layers)
    generator = torch.Generator().manual_seed(1 + peer.rank)
    inputs = torch.randn(case.model.batch, case.model.width, generator=generator)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    with hocket.attach(model, optimizer, hocket.compose(*case.recipe), peer=peer) as session:
        start = _sample(model)
        for _ in range(WARM_UP):
            step()
        session.inner.control.ibarrier().wait()
        start_s = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - start_s) / steps
        session.settle()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    told = gather(peer, [seconds, digest])
    return Turn(max(s for s, _ in told), steps, [d for _, d in told], start, _sample(model))


def make_model(described: Model) -> nn.Module:
    """Return linear layers, the same on every rank, and between them what takes time and no core."""
    import torch
    from torch import nn

    class Pause(torch.autograd.Function):
        """Stands for an accelerator: sleeps a third of its time in forward, the rest in backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(pause_s / 3)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(pause_s * 2 / 3)
            return gradient

    class Pausing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = Pause.apply(x)  # type: ignore[no-untyped-call]
            return result

    pause_s = described.pause_s / described.layers
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(described.layers):
        linear = nn.Linear(described.width, described.width, bias=False)
        nn.init.normal_(linear.weight, std=described.width**-0.5)  # gradients neither vanish nor explode
        layers.append(linear)
        if pause_s:
            layers.append(Pausing())
    return nn.Sequential(*layers)


def _sample(model: nn.Module) -> list[float]:
    import torch

    with torch.no_grad():
        flat = torch.cat([p.reshape(-1)[:: max(1, p.numel() // SAMPLE)] for p in model.parameters()])
        return flat[:: max(1, len(flat) // SAMPLE)].tolist()


# -------------------------------------------------------------------------------------------------- who starts them


def measure(mechanism: Mechanism, case: int, ranks: int, pairs: int, seconds: float) -> list[float]:
    """Return by how much longer a step is without the mechanism, in per cent, pair by pair.

    Raises:
        DifferentError: the turns did not end with the same weights.
    """
    sides = [side for pair in range(pairs) for side in ((WITH, WITHOUT), (WITHOUT, WITH))[pair % 2]]
    orders = [[side] for side in sides] if mechanism.apart else [sides]
    turns: list[Turn] = []
    for wanted in orders:
        steps = turns[0].steps if turns else 0
        with mechanism.without() if mechanism.apart and wanted == [WITHOUT] else nullcontext():
            turns += run_job(mechanism, case, wanted, ranks, seconds, steps)
    for turn in turns[1:]:
        check_same(turns[0], turn, exact=mechanism.exact)
    by_pair = [dict(zip(sides[i : i + 2], turns[i : i + 2], strict=True)) for i in range(0, len(sides), 2)]
    return [100 * (pair[WITHOUT].seconds / pair[WITH].seconds - 1) for pair in by_pair]


def run_job(
    mechanism: Mechanism, case: int, sides: list[str], ranks: int, seconds: float, steps: int
) -> list[Turn]:
    """Start ranks, and return their turns.

    Raises:
        RuntimeError: the job failed; its own messages say why.
    """
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "turns.json"
        order = Order(mechanism.name, case, sides, ranks, seconds, steps, str(out))
        program = [sys.executable, __file__, "--rank", json.dumps(asdict(order))]
        status = _START[mechanism.cases[case].where](program, ranks, Path(name))
        if status in _ASKED_TO_END:
            sys.exit(status)
        if status != 0 or not out.exists():
            raise RuntimeError(f"{mechanism.name}, {ranks} ranks: the job ended with exit status {status}")
        return [Turn(**turn) for turn in json.loads(out.read_text())]


def _on_one_host(program: list[str], ranks: int, folder: Path) -> int:
    environment = {"OMP_NUM_THREADS": "1"}
    return launch(find_mpiexec(), ranks, program, folder=folder, environment=environment)


def _on_hosts(program: list[str], ranks: int, folder: Path) -> int:
    lab = [sys.executable, str(NETLAB), "--hosts", str(ranks), "--rate", SLOW_LINK, "run", "-n", str(ranks)]
    environment = {**ALLOCATOR, **os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [*lab, "--", *program], env=environment, capture_output=True, text=True, check=False
    )
    if told.returncode:
        print(told.stdout, told.stderr, file=sys.stderr)
    return told.returncode


def _as_threads(program: list[str], ranks: int, folder: Path) -> int:
    return subprocess.run(program, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


_START: dict[Where, Callable[[list[str], int, Path], int]] = {
    Where.HOST: _on_one_host,
    Where.HOSTS: _on_hosts,
    Where.VIRTUAL: _as_threads,
}


def check_same(one: Turn, other: Turn, *, exact: bool) -> None:
    """Raise DifferentError unless two turns have trained the same.

    Args:
        exact: to the last bit; else but for a thousandth of the way from the start.
    """
    if exact:
        if one.digests != other.digests:
            raise DifferentError("the weights differ in their bits with the mechanism and without it")
        return
    way = sum((a - b) ** 2 for a, b in zip(one.end, one.start, strict=True)) ** 0.5
    apart = sum((a - b) ** 2 for a, b in zip(one.end, other.end, strict=True)) ** 0.5
    if not apart < TOLERANCE * way:
        raise DifferentError(
            f"the weights are {apart:.3g} apart with the mechanism and without it, after {way:.3g}"
        )


# ----------------------------------------------------------------------------------------------------- the command


def main() -> int:
    """Print a row for each case as it is measured; return 1 if one has failed."""
    if sys.argv[1:2] == ["--rank"]:
        rank(Order(**json.loads(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(
        prog="tools/mechanisms", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="of the names of mechanisms to measure")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4, 8], metavar="N")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.6, help="of a turn, three steps at least")
    parser.add_argument("--list", action="store_true", help="print names and files, and measure nothing")
    given = parser.parse_args()
    chosen = [m for m in MECHANISMS if not given.words or any(word in m.name for word in given.words)]
    if not chosen:
        parser.error(f"no mechanism is called so: {', '.join(m.name for m in MECHANISMS)}")
    if given.list:
        width = max(len(m.name) for m in chosen)
        print(*(f"{m.name:<{width}}  {m.file}" for m in chosen), sep="\n")
        return 0
    print("| mechanism | recipe, model | " + " | ".join(f"{ranks} ranks, %" for ranks in given.ranks) + " |")
    print("|---|---|" + "---:|" * len(given.ranks), flush=True)
    failed = False
    for mechanism in chosen:
        for number, case in enumerate(mechanism.cases):
            print(f"| {mechanism.name} | {case.title} |", end="", flush=True)
            for ranks in given.ranks:
                cell, well = _cell(mechanism, number, ranks, given.pairs, given.seconds)
                failed |= not well
                print(f" {cell} |", end="", flush=True)
            print()
    return int(failed)


def _cell(mechanism: Mechanism, case: int, ranks: int, pairs: int, seconds: float) -> tuple[str, bool]:
    if mechanism.cases[case].where is Where.HOSTS and os.geteuid() != 0:
        return "needs root", True
    try:
        gains = measure(mechanism, case, ranks, pairs, seconds)
    except (DifferentError, RuntimeError) as error:
        print(f"\ntools/mechanisms: {mechanism.name}, {ranks} ranks: {error}", file=sys.stderr)
        return "failed", False
    return f"{statistics.median(gains):.1f} ({min(gains):.1f} to {max(gains):.1f})", True


def _named(name: str) -> Mechanism:
    return next(mechanism for mechanism in MECHANISMS if mechanism.name == name)


if __name__ == "__main__":
    sys.exit(main())
