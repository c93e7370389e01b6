"""`hocket plan --analysis`: how fast the topologies of a strategy mix, as a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from hocket.cli.table import show_table
from hocket.collective.api import Ends
from hocket.config.component import build_component, component_name, telling_fields
from hocket.config.document import Document, Origin
from hocket.errors import ConfigError, UserError, reason, shortened
from hocket.pictures import NO_PICTURE, new_figure
from hocket.plugin import Kind, default_registry
from hocket.strategy.exchange import Exchange
from hocket.strategy.scope import Placement
from hocket.strategy.strategy import Strategy
from hocket.topology import Topology
from hocket.topology.analysis import Mixing, analyse

_MEASURES = {
    "second_eigenvalue": "lambda2: the second largest absolute eigenvalue of M. It is the share of the ranks' "
    "differences that remains, unless M differs between rounds",
    "deviation": "||M - J||_2: the largest share of the ranks' differences that can remain",
    "imbalance": "imbalance: the variance of M's entries; 0 if all ranks count equally everywhere",
}


#: The metadata that mark a picture as Hocket's, by the file's ending.
_MARKS = {
    ".png": {"Software": "Hocket"},
    ".svg": {"Creator": "Hocket"},
    ".pdf": {"Creator": "Hocket"},
}


def analysis_command(strategy: Strategy, placement: Placement, compare: Sequence[str], picture: Path) -> None:
    """Print the table for each exchange that has a topology, and draw the last one's picture.

    Args:
        strategy: a strategy of which an exchange has a topology.
        placement: the placement of the ranks.
        compare: further topologies, as a config writes them.
        picture: a PNG file to write; with several exchanges their names are put before its ending.

    Raises:
        UserError: no exchange has a topology, or one to compare is unknown or not defined for this number of ranks.
    """
    exchanges = [
        exchange
        for exchange in strategy.exchanges
        if exchange.topology is not None and exchange.collective.traits.ends is not Ends.OPEN
    ]
    if not exchanges:
        raise UserError(
            "--analysis needs an exchange with a topology, and this strategy has none: try recipe dpsgd, sgp or "
            "crossover"
        )
    if not picture.name:
        raise UserError("--picture is empty: name a file, such as mixing.png")
    others = [_topology(text) for text in compare]
    paths = [
        picture if len(exchanges) == 1 else picture.with_stem(f"{picture.stem}-{exchange.name}")
        for exchange in exchanges
    ]
    for path in paths:
        _refuse_others(path)
    for exchange, path in zip(exchanges, paths, strict=True):
        size = max(len(part) for part in exchange.over.parts(placement))
        print()
        if size < 2:
            print(f"{exchange.name}: a single rank has no other rank to average with.")
            continue
        found = _analyse(exchange, others, size)
        _show(exchange, size, found)
        _draw(found, f"{exchange.name} among {size} ranks", path)


def _refuse_others(picture: Path) -> None:
    """Refuse to replace a file that is no picture of Hocket's.

    Raises:
        UserError: the file exists and has no mark of Hocket's.
    """
    try:
        is_other = b"Hocket" not in picture.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"--picture {shortened(str(picture))} cannot be written: {error.strerror}") from error
    if is_other:
        raise UserError(
            f"--picture {picture} exists, but is not a picture by Hocket, so it is not replaced: name "
            "another file"
        )


def _topology(text: str) -> Topology:
    label = f"--compare {text}"
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{label} is not YAML: give a topology's name, or a mapping with its name and fields"
        ) from error
    where = replace(Document(Origin(label)).root, value=value)
    topology: Topology = build_component(Kind.TOPOLOGY, where, default_registry())
    return topology


def _analyse(exchange: Exchange, others: Sequence[Topology], size: int) -> dict[str, Mixing]:
    rounds = 2 * (size - 1).bit_length() + 2
    found = {}
    for topology in dict.fromkeys((exchange.topology, *others)):
        assert topology is not None
        try:
            topology.check_size(size)
        except ValueError as error:
            raise UserError(f"--compare {component_name(topology)}: {error}") from error
        found[_title(topology)] = analyse(topology, size, rounds)
    return found


def _title(topology: Topology) -> str:
    fields = {key: value for key, value in telling_fields(topology).items() if key != "seed"}
    settings = ", ".join(f"{key}: {value}" for key, value in fields.items())
    return component_name(topology) + (f" {{{settings}}}" if settings else "")


def _show(exchange: Exchange, size: int, found: Mapping[str, Mixing]) -> None:
    print(
        f"{exchange.name} among {size} ranks: M is the product of the matrices of k rounds, and J averages exactly. "
        "Random topologies: the mean over several draws"
    )
    headers = ["k", *found]
    for name, meaning in _MEASURES.items():
        print()
        print(meaning)
        columns = [getattr(mixing, name) for mixing in found.values()]
        rows = [
            [str(k), *map(_number, values)] for k, values in enumerate(zip(*columns, strict=True), start=1)
        ]
        show_table(headers, rows, numbers=headers)


def _number(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else "0" if value < 1e-12 else f"{value:.1e}"


def _draw(found: Mapping[str, Mixing], title: str, picture: Path) -> None:
    """Write the picture, or print what is missing if matplotlib is not installed."""
    figure = new_figure(9, 4)
    if figure is None:
        print(NO_PICTURE)
        return
    left, right = figure.subplots(1, 2)
    for color, (topology, mixing) in enumerate(found.items()):
        k = range(1, 1 + len(mixing.imbalance))
        left.plot(k, mixing.second_eigenvalue, "o-", color=f"C{color}", label=f"lambda2, {topology}")
        left.plot(k, mixing.deviation, "x--", color=f"C{color}", label=f"||M - J||, {topology}")
        right.plot(k, mixing.imbalance, "o-", color=f"C{color}", label=topology)
    left.set(xlabel="rounds k", ylim=(0, None), title=title)
    right.set_yscale("symlog", linthresh=1e-6)
    right.set(xlabel="rounds k", ylabel="imbalance", ylim=(0, None))
    for axes in (left, right):
        axes.legend(fontsize="small")
    try:
        figure.savefig(picture, dpi=120, metadata=_MARKS.get(picture.suffix.lower()))
    except OSError as error:
        raise UserError(f"--picture {picture} cannot be written: {reason(error)}") from error
    except ValueError as error:  # an ending that matplotlib does not know
        raise UserError(f"--picture {picture}: {error}") from error
    print(f"picture: {picture}")
