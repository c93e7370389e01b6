"""`hocket recommend`: predictions against sums by hand and against simulated ranks, and what mistakes look like."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import hocket
from hocket.cli.main import cli
from hocket.cli.recommend import command, showing
from hocket.delays import Delays, Fixed, RandomSubset
from hocket.errors import UserError
from hocket.plan.advice import least_bandwidth, most_hosts, predict
from hocket.plan.lateness import LOOKED_AT, held_up_seconds
from hocket.plan.plan import Plan, plan
from hocket.plugin import Registry
from hocket.plugin.discovery import KNOWN_WORDS, installed
from hocket.quantities import format_seconds
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


def test_plain_allreduce_is_level_from_some_bandwidth_on_and_up_to_some_hosts() -> None:
    exact = 8e6 / STEP_S
    least = least_bandwidth(lambda bandwidth: bandwidth >= exact)
    assert least is not None
    assert exact <= least < 1.3 * exact
    # What holds again further down is not from there on.
    assert least_bandwidth(lambda bandwidth: bandwidth >= exact or bandwidth < 0.5 * exact) == least
    assert least_bandwidth(lambda _: False) is None
    assert most_hosts(lambda hosts: hosts <= 9 or hosts == 32, (2, 4, 8, 16, 32)) == 8
    assert most_hosts(lambda hosts: hosts >= 32, (16, 32)) is None


def recommend(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["recommend", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def table(told: str) -> dict[str, dict[str, str]]:
    """Return the table's cells by row and column."""
    lines = told[told.index("strategy  ") :].splitlines()
    starts = [(match.start(), match.end(), match[0]) for match in re.finditer(r"\S+(?: \S+)*", lines[0])]
    rows = {}
    for line in lines[1 : lines.index("")]:
        cells = {header: "" for *_, header in starts}
        for match in re.finditer(r"\S+(?: \S+)*", line):
            # Numbers end where their header does, text begins there.
            [header] = [name for start, end, name in starts if match.end() == end or match.start() == start]
            cells[header] = match[0]
        rows[cells["strategy"]] = cells
    return rows


def seconds_of(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6}[unit]


def test_it_ranks_recipes_and_says_what_they_cost() -> None:
    slow, fast = (recommend(*SITUATION, "--bandwidth", each) for each in ("100mbit", "1tbit"))
    rows = table(slow)
    names = list(rows)
    # What changes nothing comes first, and both parts go by time.
    assert names[:2] == sorted(["agd", "sgd"], key=lambda name: seconds_of(rows[name]["step"]))
    assert {rows[name]["costs"] for name in names[:2]} == {"nothing"}
    times = [seconds_of(rows[name].get("as tested") or rows[name]["step"]) for name in names[2:]]
    assert times == sorted(times)
    assert ("as tested where that is given" in " ".join(slow.split())) is ("as tested" in rows["agd"])
    assert set(names) == set(table(fast))
    assert "local" not in names
    for name in names[2:]:
        letter = rows[name]["costs"]
        [listed] = re.findall(rf"^{letter}: (.*\n(?:.*\n)*?)(?=\w+: |\n)", slow, re.M)
        assert re.search(rf"^  - {re.escape(name)}: (?:.*\n)*?.*measured:", listed, re.M), name
        assert rows[name]["and up to"] == "never" or int(rows[name]["and up to"].split()[0]) <= 128
    assert rows["agd"]["agd is level from"] == ""
    assert rows["sgd"]["agd is level from"] == "0.1 Gbit/s or less"
    assert 0.1 < float(rows["periodic_average"]["agd is level from"].split()[0]) < 100
    assert {row["and up to"] for row in table(fast).values()} == {"", "128 hosts or more"}


def test_a_recipe_whose_stages_have_no_ranks_is_left_out() -> None:
    told = recommend(*SITUATION)
    assert "hierarchical_sgd" not in table(told)
    [why] = re.findall(r"^- hierarchical_sgd: (.*(?:\n  .*)*)", told[told.index("Left out here:") :], re.M)
    assert " ".join(why.split()).startswith("no two ranks take part in gradients.0, gradients.2")
    assert "hierarchical_sgd" in table(recommend(*SITUATION, "--hosts", "4x2"))


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
    four, eight = (
        {name: round(max(each[part]), 1) for name, each in off.items()} for part in (slice(4), slice(4, 8))
    )
    told = " ".join(recommend(*SITUATION).split())
    others = max(each for name, each in four.items() if name != "eager.solo")
    assert f"at most a factor of {others}, for eager.solo {four['eager.solo']}; on 8 ranks" in told
    assert (
        f"{eight['eager.solo']} for eager.solo, {eight['sgp']} for sgp and {eight['redsync']} for redsync "
        "(docs/choosing.md)"
    ) in told
    assert max(each for name, each in eight.items() if name not in ("eager.solo", "sgp", "redsync")) <= others


@pytest.mark.parametrize(
    ("seconds", "told"), [(562.3, "562 s"), (999.7, "1,000 s"), (14105.2, "14,105 s"), (0.0123, "12.3 ms")]
)
def test_seconds_are_written_without_powers_of_ten(seconds: float, told: str) -> None:
    assert format_seconds(seconds) == told


def test_packages_whose_recipes_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [entry for entry in installed() if entry.name == "redsync"]
    monkeypatch.setattr(command, "default_registry", lambda: Registry(lambda: there))
    told = " ".join(recommend(*SITUATION).split())
    absent = [word for word in KNOWN_WORDS if word not in ("tasks", *(entry.name for entry in there))]
    assert (
        f"Recipes of {', '.join(f'hocket-{word}' for word in absent)} are not installed: pip install " in told
    )
    assert "diloco" in absent
    assert not showing.absent(KNOWN_WORDS)


def test_plain_allreduce_is_level_with_a_row_as_the_row_says() -> None:
    told = table(recommend(*SITUATION))["periodic_average"]["agd is level from"]
    gbits = float(told.split()[0])
    for factor, holds in ((1.02, True), (0.8, False)):
        rows = table(recommend(*SITUATION, "--bandwidth", f"{factor * gbits:.4f}gbit"))
        plain, other = (seconds_of(rows[name]["step"]) for name in ("agd", "periodic_average"))
        # The table has three digits.
        assert (plain <= 1.052 * other) is holds


def test_an_own_strategy_is_a_row(tmp_path: Path) -> None:
    exchange = "{collective: allreduce, every: 20}"
    (tmp_path / "mine.yaml").write_text(f"strategy: {{parameters: [{exchange}]}}\n")
    rows = table(recommend(str(tmp_path / "mine.yaml"), *SITUATION))
    assert rows["mine.yaml"]["costs"] == "not measured"
    assert seconds_of(rows["mine.yaml"]["step"]) < seconds_of(rows["periodic_average"]["step"])
    rows = table(recommend("periodic_average", "parameters.0.every=20", *SITUATION))
    assert (
        rows["periodic_average, every=20"]["step"]
        == table(recommend(str(tmp_path / "mine.yaml"), *SITUATION))["mine.yaml"]["step"]
    )
    # A recipe as it is has its row already.
    assert len(table(recommend("periodic_average", *SITUATION))) == len(rows) - 1
    phases = (
        "strategy: {gradients: [{collective: allreduce}]}\nphases: {100: {gradients: [], parameters: [%s]}}\n"
    )
    (tmp_path / "later.yaml").write_text(phases % exchange)
    (tmp_path / "based.yaml").write_text(f"recipe: agd\n{phases.partition(chr(10))[2] % exchange}")
    for name in ("later.yaml", "based.yaml"):
        shown = recommend(str(tmp_path / name), *SITUATION)
        # Not what the recipe costs that comes before.
        assert f"{name}, from step 100 on: your own\n" in shown


def test_a_run_s_folder_is_a_row(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    run = load_run({"parameters": [{"collective": "allreduce", "every": 3}]})
    (folder / "config.yaml").write_text(text_of_config(resolved(run)))
    assert "mine" in table(recommend(str(folder), *SITUATION))


def test_ranks_that_are_late_now_and_then_hold_up_less() -> None:
    always, seldom = (
        seconds_of(table(recommend(*SITUATION, "--late", late))["sgd"]["held up"])
        for late in ("1x300ms", "1x0.3s@10%")
    )
    assert always == pytest.approx(0.3)
    assert 0.01 < seldom < 0.06


def test_it_takes_a_task_a_function_a_file_and_an_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--hosts", "4x2", "--step", "0.1"]
    assert "2 hosts" not in recommend("task=digits", *given)
    (tmp_path / "mine.py").write_text("import torch\ndef net(): return torch.nn.Linear(10, 10)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "110 parameters" in recommend("--model", "mine:net", *given)
    file = tmp_path / "run.yaml"
    file.write_text("recipe: dpsgd\nranks: 4\ncompute: {step_s: 0.2}\n")
    assert "a step computes 200 ms" in recommend(str(file))
    adamw = recommend("task=digits", *given, "--optimizer", "adamw", "--late", "1x0.3", "--all")
    assert "late ranks: random_subset {count: 1, seconds: 0.3" in " ".join(adamw.split())


def test_it_measures_a_task_s_step_and_compressors() -> None:
    told = recommend("task=digits", "--hosts", "2x1", "--measure")
    assert "compressing" in told
    assert re.search(r"a step computes [\d.]+ [mu]s", told)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--hosts is missing"),
        (["--hosts", "1x1", "--params", "1M", "--step", "1"], "a single rank exchanges nothing"),
        (["--hosts", "2x1", "--step", "1"], "the model is missing"),
        (["--hosts", "2x1", "--params", "1M"], "--step is missing"),
        (["--hosts", "2x1", "--params", "1M", "--measure"], "--step is missing"),
        (["--hosts", "2x1", "--params", "many"], "--params: got 'many'"),
        (["--hosts", "2x1", "--params", "1M", "--model", "a:b"], "leave one out"),
        (["--hosts", "2x1", "--model", "nothing"], "'module:attribute'"),
        (["--hosts", "2x1", "--model", "no_such_module:net"], "no_such_module"),
        (["--hosts", "2x1", "--model", "os:getcwd"], "returned str, no torch.nn.Module"),
        (["--hosts", "2x1", "--bandwidth", "fast"], "--bandwidth: got 'fast'"),
        (
            ["--hosts", "2x1", "--latency", "5"],
            "--latency: got '5', which would be 5 seconds: write 5us, 5ms or 5s",
        ),
        (["--hosts", "2x1", "--late", "often"], "--late: got 'often'; allowed: 1x300ms"),
        (
            ["--hosts", "2x1", "--late", "1x300"],
            "--late 1x300: got '300', which would be 300 seconds: write 300ms",
        ),
        (["--hosts", "2x1", "--late", "1x3s@120%"], "--late 1x3s@120%: fraction is 1.2; allowed: 0 to 1"),
        (
            ["--hosts", "2x1", "--params", "1M", "--step", "200"],
            "--step: got '200', which would be 200 seconds: write",
        ),
        (["--hosts", "2x1", "--params", "1M", "--step", "0"], "--step: a step computes for more than 0 s"),
        (["--hosts", "8", "--params", "1M"], "hosts '8': 8 hosts of one rank are 8x1"),
        (
            ["parameters.0.every=30", "--hosts", "2x1"],
            "parameters.0.every=30 changes one strategy: name it, such as",
        ),
        (["periodic_avarage", "--hosts", "2x1"], "Did you mean 'periodic_average'?"),
        (["sgd", "--hosts", "2x1"], "the model is missing"),
        (["--hosts", "2x1", "--params", "1M", "--step", "1", "--late", "3x1"], "--late among 2 ranks"),
        (["--hosts", "2x1", "--params", "1M", "--step", "1", "--optimizer", "adamv"], "adamv"),
        (["nowhere", "--hosts", "2x1"], "neither a YAML file nor the folder of a run"),
    ],
)
def test_a_mistake_is_told_in_a_line(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError) as raised:
        recommend(*arguments)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_number_of_ranks_is_answered_with_hosts() -> None:
    result = CliRunner().invoke(cli, ["recommend", "-n", "8", "--params", "1M"])
    assert result.exit_code == 2
    assert "--hosts 8x1 for 8 hosts of one rank" in " ".join(result.output.split())
