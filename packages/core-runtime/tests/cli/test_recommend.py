"""`hocket recommend`: predictions against sums by hand and against simulated ranks, and what mistakes look like."""

from __future__ import annotations

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hocket
from hocket.cli.main import cli
from hocket.cli.printing import say_command
from hocket.config.settings import RunSettings
from hocket.delays import ComputeModel, Delays, Fixed, RandomSubset
from hocket.errors import UserError
from hocket.plan.advice import (
    CLOSE,
    ERROR,
    LOSS_OF_HALF,
    PLAIN,
    UNMEASURED,
    Advice,
    AdvisedStrategy,
    predict,
)
from hocket.plan.lateness import LOOKED_AT, held_up_seconds
from hocket.plan.plan import Plan, plan
from hocket.plan.situation import TrainingSituation
from hocket.plugin import Registry
from hocket.plugin.discovery import KNOWN_WORDS, installed
from hocket.quantities import format_count, format_seconds
from hocket.results.kept_config import text_of_config
from hocket.strategy.scope import Placement
from hocket.training.run import load_run, resolved
from hocket.transport.network import NetworkModel

RANKS, STEP_S = 4, 0.1
NETWORK = NetworkModel(latency_s=1e-3, bandwidth_bits_per_s=1.6e6)
SITUATION = ["--params", "25M", "--hosts", "8x1", "--bandwidth", "1gbit", "--step", "100ms"]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(5)))


def planned(*strategy: str, ranks: int = RANKS) -> Plan:
    return plan(hocket.compose(*strategy), model(), Placement(tuple(range(ranks))), NETWORK)


def drawn(delays: Delays, ranks: int = RANKS) -> np.ndarray:
    return np.stack([delays.of_step(step, ranks, 0) for step in range(LOOKED_AT)])


def test_who_meets_all_others_in_each_step_is_held_up_by_the_latest() -> None:
    delays = RandomSubset(2, 0.3)
    held_up_s = held_up_seconds(planned("sgd"), STEP_S, delays)
    assert held_up_s == pytest.approx(drawn(delays).max(axis=1).mean())


def test_who_meets_them_at_the_end_of_a_period_is_held_up_by_the_latest_of_a_period() -> None:
    delays = RandomSubset(1, 0.3)
    held_up_s = held_up_seconds(planned("periodic_average"), STEP_S, delays)
    of_periods = drawn(delays).reshape(-1, 8, RANKS).sum(axis=1)
    assert held_up_s == pytest.approx(of_periods.max(axis=1).sum() / LOOKED_AT)


def test_who_meets_nobody_is_held_up_by_itself_alone() -> None:
    delays = Fixed([1], 0.2)
    assert held_up_seconds(planned("local"), STEP_S, delays) == pytest.approx(0.2 / RANKS)


def test_stages_of_an_exchange_hand_lateness_on() -> None:
    for recipe in ("sgd", "hierarchical_sgd"):
        on_hosts = plan(hocket.compose(recipe), model(), Placement.of_counts([2, 2]), NETWORK)
        delays = RandomSubset(1, 0.3)
        assert held_up_seconds(on_hosts, STEP_S, delays) == pytest.approx(0.3)


def test_a_slow_rank_holds_up_everybody_it_hears_of() -> None:
    # Over a ring it takes some steps until all know of it; from then on all are as slow.
    held_up_s = held_up_seconds(planned("dpsgd", ranks=8), STEP_S, Fixed([3], 0.2))
    assert 0.19 < held_up_s < 0.2


def test_a_delay_hides_lateness_within_a_step() -> None:
    delays = RandomSubset(1, 0.05)
    now, later = (
        held_up_seconds(planned("periodic_average", "parameters.0.every=1", *delay), STEP_S, delays)
        for delay in ((), ("parameters.0.delay=1",))
    )
    assert now == pytest.approx(0.05)
    assert later < 0.6 * now


@pytest.mark.one_of_each
@pytest.mark.parametrize("late", [None, RandomSubset(1, 0.2)])
@pytest.mark.parametrize("recipe", ["sgd", "dpsgd", "sgp", "periodic_average"])
def test_it_predicts_what_simulated_ranks_take(recipe: str, late: Delays | None) -> None:
    steps = 40

    def train() -> float:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        peer = hocket.join()
        with hocket.attach(net, optimizer, recipe) as session:
            for step in range(steps):
                peer.clock.elapse(STEP_S + (0.0 if late is None else late.of_step(step, RANKS, 0)[peer.rank]))
                optimizer.zero_grad()
                net(torch.ones(1, 20)).square().mean().backward()
                optimizer.step()
            session.settle()
            return peer.clock.now() / steps

    taken = hocket.virtual(RANKS, network=NETWORK).run(train)
    held_up_s = 0.0 if late is None else held_up_seconds(planned(recipe), STEP_S, late)
    predicted = predict(planned(recipe), STEP_S, held_up_s).step_s
    assert predicted == pytest.approx(np.mean(taken), rel=0.1)


def recommend(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["recommend", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


class Told:
    """The answer of `hocket recommend --json`: its rows by name."""

    def __init__(self, *arguments: str) -> None:
        self.all = json.loads(recommend(*arguments, "--json"))
        self.rows = {row["strategy"]: row for row in self.all["strategies"]}

    def step_s(self, name: str) -> float:
        return float(self.rows[name]["step_s"])


def table(text: str) -> dict[str, str]:
    """Return the lines of the table by strategy."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.split()[:2] == ["strategy", "step"])
    return {line.lstrip("* ").split("  ")[0]: line for line in lines[start + 1 : lines.index("", start)]}


def test_its_answer_is_fifteen_lines_of_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    islands = ("--hosts", "4x8", "--island", "8", "--params", "7B")
    for more in ((), ("--bandwidth", "1tbit"), ("--bandwidth", "100mbit", "--late", "1x300ms@10%"), islands):
        lines = recommend(*SITUATION, *more).splitlines()
        assert len(lines) <= 15
        assert max(map(len, lines)) <= 80
    monkeypatch.setattr("hocket.cli.recommending.default_registry", lambda: Registry(list))
    assert len(recommend(*SITUATION, "--bandwidth", "100mbit").splitlines()) <= 15


def test_no_row_is_wider_than_seventy_nine_columns() -> None:
    own = ("periodic_average", "synchronous_steps=100000", "parameters.0.every=20", "parameters.0.delay=5")
    text = recommend(*own, *SITUATION)
    rows = table(text)
    assert {"periodic_average,", PLAIN} <= {*rows}
    assert max(map(len, rows.values())) <= 79
    whole = ", ".join(("periodic_average", "synchronous_steps=100000", "every=20", "delay=5", "from step"))
    assert whole in " ".join(re.sub(r"(?m)^(.{33}).*$", r"\1", text).split())


def test_ranks_of_one_host_have_no_link_between_them() -> None:
    for given in ((), ("--bandwidth", "1mbit", "periodic_average", "parameters.0.every=30")):
        text = recommend("--params", "25M", "--hosts", "1x4", "--step", "1ms", *given)
        assert text.startswith("4 ranks on one host, 25.0 M parameters")
        assert "bit/s" not in text
    assert (
        table(text)[PLAIN].split()[1]
        == table(recommend("--params", "25M", "--hosts", "1x4", "--step", "1ms"))[PLAIN].split()[1]
    )


def test_a_row_is_marked_and_its_command_composes() -> None:
    text, told = recommend(*SITUATION, "--bandwidth", "100mbit"), Told(*SITUATION, "--bandwidth", "100mbit")
    [marked] = (name for name, line in table(text).items() if line.startswith("*"))
    assert marked == told.all["best"]
    [command] = re.findall(r"^Try first: (hocket sweep --script train\.py .*(?:\\\n.*)*)$", text, re.M)
    strategy = shlex.split(command)[-1].partition("=")[2].split(",")[1]
    assert hocket.compose(*strategy.split(" ")).exchanges
    assert 2 <= len(table(text)) <= 5
    assert list(table(text)) == sorted(table(text), key=told.step_s)
    # Plain allreduce is there, and nothing that is not faster.
    plain_s = told.step_s(PLAIN)
    assert all(plain_s > CLOSE * told.step_s(name) for name in table(text) if name != PLAIN)
    assert told.rows[marked]["faster"] == pytest.approx(plain_s / told.step_s(marked))


#: Sending takes most of a step.
SLOW = TrainingSituation(
    model(), Placement.of_counts([1, 1]), RunSettings(network=NETWORK, compute=ComputeModel(0.01))
)


def advised(
    name: str, *strategy: str, about: RunSettings = UNMEASURED, is_own: bool = False
) -> AdvisedStrategy:
    composed = hocket.compose(*strategy)
    prediction = predict(SLOW.plan(composed), SLOW.settings.compute.step_s)
    return AdvisedStrategy(name, name, composed, prediction, about, is_own)


def advice_of(*rivals: AdvisedStrategy, by_accuracy: bool = False) -> Advice:
    """Compare strategies with plain allreduce."""
    plain = advised(PLAIN, PLAIN, about=RunSettings(changes="nothing"))
    rows = sorted((plain, *rivals), key=lambda row: row.prediction.step_s)
    return Advice(SLOW, rows, by_accuracy)


def averaging(
    every: int, loss: float | None = None, points: float | None = None, *, is_own: bool = False
) -> AdvisedStrategy:
    about = RunSettings(loss_percent=loss, accuracy_points=points)
    strategy = ("periodic_average", f"parameters.0.every={every}")
    return advised(f"every{every}", *strategy, about=about, is_own=is_own)


def test_the_marked_row_is_the_fastest_after_its_cost_is_charged() -> None:
    """As long as a step, with twice the steps, of what costs what sgd loses with half of them."""
    rivals = (averaging(80, 17.5, -0.1), averaging(60, 5.0, -0.2), averaging(2, 1.0, 0.5), averaging(70))
    advice = advice_of(*rivals)
    step_s = {row.name: row.prediction.step_s for row in advice.rows}
    assert [row.name for row in advice.rows][-1] == PLAIN
    charged = {
        "every80": step_s["every80"] * 2 ** (17.5 / LOSS_OF_HALF),
        "every60": step_s["every60"] * 2 ** (5.0 / LOSS_OF_HALF),
        "every2": step_s["every2"] * 2 ** (1.0 / LOSS_OF_HALF),
    }
    assert advice.best.name == min(charged, key=lambda name: charged[name]) == "every60"
    # With SGD it is the accuracy of SGD that counts.
    assert advice_of(*rivals, by_accuracy=True).best.name == "every80"


def test_what_is_hardly_faster_and_costs_much_is_not_recommended() -> None:
    faster = averaging(2)
    ratio = advice_of().rows[0].prediction.step_s / faster.prediction.step_s
    assert ratio > CLOSE
    for part, is_best in ((0.9, True), (1.1, False)):
        loss = part * LOSS_OF_HALF * math.log2(ratio)
        assert (advice_of(averaging(2, loss)).best.name == "every2") is is_best


def test_nothing_is_recommended_where_plain_allreduce_is_as_fast() -> None:
    text = recommend(*SITUATION, "--bandwidth", "1tbit")
    assert list(table(text)) == [PLAIN]
    assert table(text)[PLAIN].startswith("*")
    assert "Plain allreduce (agd, DDP) is best here" in text
    assert "Try first" not in text


def test_what_was_not_measured_is_never_recommended() -> None:
    advice = advice_of(averaging(8, is_own=True))
    assert advice.faster(advice.rows[0]) > CLOSE  # though it is faster
    assert advice.best == advice.plain
    assert advice.shown(1) == [advice.plain]
    assert advice_of(averaging(8, 3.0)).best.name == "every8"


def test_a_family_has_one_row() -> None:
    rivals = [replace(averaging(20 + place, 9.0 - place), name=f"diloco.{place}") for place in range(3)]
    advice = advice_of(*rivals, averaging(2, 1.0))
    assert [row.name for row in advice.shown(5)] == ["diloco.2", "every2", PLAIN]


def test_explained_rows_say_what_they_change_and_what_that_cost() -> None:
    text = recommend(*SITUATION, "--bandwidth", "100mbit", "--explain", "--all")
    short = recommend(*SITUATION, "--bandwidth", "100mbit")
    for name in table(text):
        [notes] = re.findall(rf"^{re.escape(name)}\n((?:  .*\n)+)", text, re.M)
        assert notes.count("  - ") >= 2
    assert set(table(short)) < set(table(text))
    assert "Assumed:" in text
    assert "Assumed:" not in short


def test_a_recipe_whose_stages_have_no_ranks_is_left_out() -> None:
    told = Told(*SITUATION)
    assert "hierarchical_sgd" not in told.rows
    assert told.all["left_out"]["hierarchical_sgd"].startswith(
        "no two ranks take part in gradients.0, gradients.2"
    )
    assert "hierarchical_sgd" in Told(*SITUATION, "--hosts", "4x2").rows


def test_its_known_error_is_that_of_the_measured_table() -> None:
    choosing = (Path(__file__).resolve().parents[4] / "docs" / "choosing.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \|((?: +(?:\d+, \d+)? ?\|){8})$", choosing, re.M)
    off: dict[str, list[float]] = {}
    for name, cells in rows:
        pairs = [
            tuple(map(float, cell.split(","))) if cell.strip() else (1.0, 1.0)
            for cell in cells.split("|")[:8]
        ]
        off[name] = [max(one / other, other / one) for one, other in pairs]
    assert len(off) == 10
    four = {name: round(max(each[:4]), 1) for name, each in off.items()}
    assert max(each for name, each in four.items() if name != "eager.solo") == ERROR


@pytest.mark.parametrize(
    ("seconds", "told"), [(562.3, "562 s"), (999.7, "1,000 s"), (14105.2, "14,105 s"), (0.0123, "12.3 ms")]
)
def test_seconds_are_written_without_powers_of_ten(seconds: float, told: str) -> None:
    assert format_seconds(seconds) == told


def test_packages_that_are_not_installed_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [entry for entry in installed() if entry.name == "redsync"]
    monkeypatch.setattr("hocket.cli.recommending.default_registry", lambda: Registry(lambda: there))
    absent = [word for word in KNOWN_WORDS if word not in ("tasks", *(entry.name for entry in there))]
    assert f"; not installed: {len(absent)} packages (hocket plugins)" in recommend(*SITUATION)
    text = recommend(*SITUATION, "--explain")
    assert all(f"- hocket-{word}: not installed\n" in text for word in absent)


def test_plain_allreduce_is_as_fast_as_the_best_from_the_bandwidth_that_is_said() -> None:
    told = Told(*SITUATION)
    name, least = told.all["best"], told.all["best_is_level_from_bits_per_s"]
    assert name != PLAIN
    for factor, is_level in ((1.02, True), (0.8, False)):
        there = Told(*SITUATION, "--bandwidth", f"{factor * least / 1e9:.6f}gbit")
        assert (there.step_s(PLAIN) <= CLOSE * there.step_s(name)) is is_level


def test_an_own_strategy_is_a_row(tmp_path: Path) -> None:
    exchange = "{collective: allreduce, segments: bytes, every: 20}"  # as periodic_average has them
    (tmp_path / "mine.yaml").write_text(f"strategy: {{parameters: [{exchange}]}}\n")
    mine = str(tmp_path / "mine.yaml")
    told = Told(mine, *SITUATION)
    assert told.rows["mine.yaml"]["loss_percent"] is None
    assert told.step_s("mine.yaml") < told.step_s("periodic_average")
    assert "mine.yaml" in table(recommend(mine, *SITUATION, "--bandwidth", "1tbit"))
    changed = Told("periodic_average", "parameters.0.every=20", *SITUATION)
    assert changed.step_s("periodic_average, every=20") == told.step_s("mine.yaml")
    # A recipe as it is has its row already.
    assert len(Told("periodic_average", *SITUATION).rows) == len(changed.rows) - 1
    phases = (
        "strategy: {gradients: [{collective: allreduce}]}\nphases: {100: {gradients: [], parameters: [%s]}}\n"
    )
    (tmp_path / "later.yaml").write_text(phases % exchange)
    (tmp_path / "based.yaml").write_text(f"recipe: agd\n{phases.partition(chr(10))[2] % exchange}")
    for name in ("later.yaml", "based.yaml"):
        rows = Told(str(tmp_path / name), *SITUATION).rows
        # Not what the recipe costs that comes before.
        assert not rows[f"{name}, from step 100 on"]["same_result"]
        assert not rows[f"{name}, from step 100 on"]["notes"]
        assert Told(str(tmp_path / name), *SITUATION).step_s(f"{name}, from step 100 on") == told.step_s(
            "mine.yaml"
        )
        # A run that ends before the phase has nothing of it.
        assert not any("from step" in row for row in Told(str(tmp_path / name), "steps=90", *SITUATION).rows)


def test_a_run_s_folder_is_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    run = load_run({"parameters": [{"collective": "allreduce", "every": 3}]})
    (folder / "config.yaml").write_text(text_of_config(resolved(run)))
    told = Told(str(folder), *SITUATION)
    assert "mine" in told.rows
    assert told.all["left_out"] == Told(*SITUATION).all["left_out"]
    # It has measured how long a step computes.
    summary = {"steps": 8, "ranks": 2, "seconds": 1.0, "steps_per_second": 8.0, "exposed_wait_fraction": 0.2}
    (folder / "summary.json").write_text(json.dumps(summary))
    asked = (str(folder), "--params", "1M", "--hosts", "8x1")
    assert Told(*asked).all["compute_s"] == pytest.approx(0.1)
    (folder / "summary.json").write_text(json.dumps({**summary, "steps_per_second": None}))
    with pytest.raises(UserError, match=r"^--step: give the computing time of a step"):
        Told(*asked)
    (folder / "summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"summary.json is damaged \(.*\): give --step and --params, and no"):
        Told(*asked)


def test_a_synchronous_start_is_of_the_strategy_that_is_named() -> None:
    own = ("periodic_average", "synchronous_steps=240", "parameters.0.every=20")
    rows = Told(*own, *SITUATION).rows
    [name] = (name for name in rows if name.endswith(", from step 240 on"))
    assert name.startswith("periodic_average, synchronous_steps=240")
    assert PLAIN in rows


def test_no_line_of_a_command_ends_within_quotes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words, last = (
        "hocket sweep --script a_script_of_a_longer_name.py -n 4",
        "strategy=agd,diloco every=30 delay=1",
    )
    say_command("Try first: ", words, last)
    text = capsys.readouterr().out
    assert text.count("\\\n") == 1
    assert shlex.split(text.replace("\\\n", "")) == ["Try", "first:", *words.split(), last]


def test_the_marked_row_is_shown_beside_a_strategy_that_several_recipes_have() -> None:
    """A run of agd is each of these rows."""
    same = [replace(averaging(30 + place, is_own=True), name=f"same.{place}") for place in range(6)]
    advice = advice_of(*same, averaging(2, 3.0))
    assert advice.best.name == "every2"
    assert advice.best in advice.shown()


def test_ranks_that_are_late_now_and_then_hold_up_less() -> None:
    always, seldom = (
        Told(*SITUATION, "--late", late).rows["sgd"]["held_up_s"] for late in ("1x300ms", "1x0.3s@10%")
    )
    assert always == pytest.approx(0.3)
    assert 0.01 < seldom < 0.06


def test_it_takes_a_task_a_function_a_file_and_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--hosts", "4x2", "--step", "0.1"]
    assert recommend("task=digits", *given).startswith("8 ranks on 4 hosts, ")
    (tmp_path / "mine.py").write_text("import torch\ndef net(): return torch.nn.Linear(10, 10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "110 parameters" in recommend("--model", "mine:net", *given)
    file = tmp_path / "run.yaml"
    file.write_text("recipe: dpsgd\nranks: 4\ntask: digits\ncompute: {step_s: 0.2}\n")
    text = recommend(str(file), "--hosts", "4x1", "--bandwidth", "1tbit")
    assert "200 ms of computing" in " ".join(text.split())
    assert "dpsgd" in table(text)
    adamw = recommend("task=digits", *given, "optimizer=adamw", "--late", "1x0.3", "--all")
    assert "late ranks: random_subset {count: 1, seconds: 0.3" in " ".join(adamw.split())


def test_counts_have_no_point_without_a_digit_behind_it() -> None:
    assert [format_count(number) for number in (350_000_000, 25_000_000, 9_610)] == [
        "350 M",
        "25.0 M",
        "9.61 k",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hosts", "1x1", "--params", "1M", "--step", "1"], "one replica cannot exchange anything"),
        (["--hosts", "2x1", "--step", "1"], "the model is missing"),
        (["--hosts", "2x1", "--params", "1M"], "--step: give the computing time of a step"),
        (["--hosts", "2x1", "--params", "many"], "--params: got 'many'"),
        (["--hosts", "2x1", "--params", "1M", "--model", "a:b"], "leave one out"),
        (["--hosts", "2x1", "--model", "nothing"], "'module:attribute'"),
        (["--hosts", "2x1", "--model", "no_such_module:net"], "no_such_module"),
        (["--hosts", "2x1", "--model", "os:getcwd"], "returned str, not a torch.nn.Module"),
        (["--hosts", "2x1", "--bandwidth", "fast"], "--bandwidth: got 'fast'"),
        (
            ["--hosts", "2x1", "--latency", "5"],
            "--latency: got '5', which would be 5 seconds: write 5us, 5ms or 5s",
        ),
        (["--hosts", "2x1", "--late", "often"], "--late: got 'often'; allowed: 1x300ms"),
        (
            ["--hosts", "2x1", "--late", "1x300"],
            "--late: got '300', which would be 300 seconds: write 300ms",
        ),
        (["--hosts", "2x1", "--late", "1x3s@120%"], "delays.fraction: fraction is 1.2; allowed: 0 to 1"),
        (
            ["--hosts", "2x1", "--params", "1M", "--step", "200"],
            "--step: got '200', which would be 200 seconds: write",
        ),
        (
            ["--hosts", "2x1", "--params", "1M", "--step", "0"],
            "--step: give the computing time of a step",
        ),
        (["-n", "8", "--params", "1M"], "hosts '8': write 8x1 for 8 hosts of one rank"),
        (["--hosts", "8", "--params", "1M"], "hosts '8': write 8x1 for 8 hosts of one rank"),
        (
            ["parameters.0.every=30", "--hosts", "2x1"],
            "parameters.0.every=30: name at most one recipe, file or run, and its overrides after it",
        ),
        (
            ["periodic_avarage", "--hosts", "2x1", "--params", "1M", "--step", "1"],
            "Did you mean 'periodic_average'?",
        ),
        (["sgd", "--hosts", "2x1"], "the model is missing"),
        (["--hosts", "2x1", "--params", "1M", "--step", "1", "--late", "3x1"], "delays do not fit 2 ranks"),
        (["--hosts", "2x1", "--params", "1M", "--step", "1", "optimizer=adamv"], "adamv"),
        (
            ["--hosts", "2x3", "--island", "2", "--params", "1M", "--step", "1"],
            "islands of 2 ranks do not fit hosts of 3 ranks",
        ),
        (
            ["--hosts", "1x2", "--island", "2", "--params", "1M", "--step", "1"],
            "one replica cannot exchange anything",
        ),
        (
            ["--hosts", "3x1", "--island", "2", "--params", "1M", "--step", "1"],
            "3 ranks cannot be divided into islands of 2",
        ),
        (["nowhere", "--hosts", "2x1", "--params", "1M", "--step", "1"], "there is no recipe 'nowhere'"),
    ],
)
def test_a_mistake_is_told_in_a_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        recommend(*arguments)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_islands_send_shards_over_shared_links() -> None:
    common = ("--params", "25M", "--bandwidth", "1gbit", "--latency", "0us", "--step", "1s", "--all")
    islands = Told("--hosts", "4x8", "--island", "8", *common)
    wholes = Told("--hosts", "4x1", *common)
    for name in ("sgd", "dpsgd", "periodic_average"):
        # An eighth of the bytes from each of eight ranks, which share the link.
        for key, share in (("bytes_per_step", 8), ("step_s", 1)):
            assert islands.rows[name][key] == pytest.approx(wholes.rows[name][key] / share, rel=0.01)
    memory = (told.rows["sgd"]["memory_bytes"] for told in (wholes, islands))
    assert next(memory) == pytest.approx(8 * next(memory), rel=0.01)
    text = recommend("--hosts", "4x8", "--island", "8", *common, "--bandwidth", "100mbit", "--explain")
    assert "32 ranks in 4 islands of 8 on 4 hosts, 100 Mbit/s" in text
    assert "-n 32" in text
    assert "Islands: 8 ranks hold a replica together" in text


def test_a_late_rank_holds_up_its_island() -> None:
    common = ("--params", "25M", "--bandwidth", "100gbit", "--step", "100ms")
    islands = Told("--hosts", "4x2", "--island", "2", "--late", "1x300ms", *common)
    wholes = Told("--hosts", "4x1", "--late", "1x300ms", *common)
    assert islands.rows["sgd"]["held_up_s"] == pytest.approx(wholes.rows["sgd"]["held_up_s"], rel=0.01)
