"""`hocket plan` promises what a session then does: bytes as counted, memory as allocated."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hocket
from hocket.cli.main import cli
from hocket.cli.planning import plan_command
from hocket.cli.planning_several import plan_several
from hocket.collective.gossip import GossipChannel
from hocket.errors import CompositionError, ConfigError, UserError
from hocket.launch.hosts import parse_hosts
from hocket.plan.layout import buffer_bytes
from hocket.plan.plan import plan
from hocket.plugin import CORE, default_registry
from hocket.session.engine import Engine
from hocket.strategy.scope import Placement
from hocket.task.models import build
from hocket.testing.memory import covered_bytes
from hocket.testing.session import inner_of
from hocket.training.run import load_run
from hocket.transport.network import NetworkModel

RECIPES = [recipe.name for recipe in default_registry().recipes() if recipe.plugin == CORE]
NETWORK = NetworkModel(latency_s=1e-3, bandwidth_bits_per_s=8e6)


class Mixed(nn.Module):
    """Two dtypes, a frozen parameter, a shared one, sizes that need padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.sixteen = nn.Linear(3, 3, dtype=torch.bfloat16)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.last = nn.Linear(3, 3)
        self.last.weight = nn.Parameter(self.last.weight.detach().clone())
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.last.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.tied(self.last(self.sixteen(self.first(x).bfloat16()).float()))
        return y


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "mixed":
        return Mixed(), torch.randn(4, 5)
    return build(name, (1, 8, 8), 10, (32,)), torch.randn(4, 1, 8, 8)


def train(name: str, strategy: Any, steps: int) -> tuple[nn.Module, hocket.Session]:
    model, inputs = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = hocket.attach(model, optimizer, strategy)
    for _ in session.data([None] * steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    session.settle()
    return model, session


@pytest.fixture
def only_new_objects() -> None:
    """Hide all objects that there are already from `gc.get_objects`, which is faster with fewer."""
    gc.collect()
    gc.freeze()


def tensor_bytes() -> int:
    """Return the bytes of all memory that new tensors hold, but for the states of random generators."""
    gc.collect()
    state = torch.get_rng_state()
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type == "cpu" and thing.shape != state.shape:
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    start = storage.data_ptr()
                    storages[start] = max(storages.get(start, 0), storage.nbytes())
    return covered_bytes(storages)


@pytest.mark.one_of_each
@pytest.mark.parametrize(("model", "ranks"), [("mlp", 3), ("cnn", 4), ("mixed", 3)])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bytes_are_those_that_a_session_counts(recipe: str, model: str, ranks: int) -> None:
    strategy = hocket.compose(recipe)
    with torch.device("meta"):
        planned = plan(strategy, model_of(model)[0], ranks, NETWORK)
    steps = 8

    def counted() -> float:
        _, session = train(model, strategy, steps)
        session.close()  # or a progress thread would wait for others for ever
        return session.counters.bytes_sent / steps

    sent = hocket.virtual(ranks).run(counted)
    assert sent == [pytest.approx(planned.bytes_per_step, rel=1e-12)] * ranks
    assert (planned.bytes_per_step > 0) == (recipe != "local")


@pytest.mark.one_of_each
@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("model", ["cnn", "mixed"])
@pytest.mark.parametrize(
    "overrides",
    [
        ["recipe=sgd"],
        ["recipe=agd"],
        ["recipe=periodic_average", "parameters.0.every=1"],
        ["recipe=periodic_average", "parameters.0.every=1", "parameters.0.delay=1"],
        ["recipe=agd", "parameters=[{collective: broadcast, segments: layers}]"],
        ["recipe=local"],
    ],
    ids=" ".join,
)
def test_memory_is_what_is_allocated(model: str, overrides: list[str]) -> None:
    strategy = load_run({}, overrides).strategy
    ranks = 3
    assert tensor_bytes() == 0
    alone, _ = model_of(model)
    model_bytes = tensor_bytes()
    planned = plan(strategy, alone, ranks, NETWORK)
    del alone
    # What the ranks return holds everything that they have allocated.
    ended = hocket.virtual(ranks).run(lambda: train(model, strategy, 2))
    allocated = tensor_bytes() / ranks - model_bytes
    assert len(ended) == ranks
    if not strategy.gradients:
        # The gradients of plain training, which stay on the rank.
        allocated -= planned.model_bytes
    # Parameters are padded when they move into flat memory, and memory is rounded up to 64 bytes.
    padding = 0.1 * model_bytes if model == "cnn" else 64 * 12
    assert allocated == pytest.approx(planned.memory_bytes, rel=0.1, abs=padding)


@pytest.mark.parametrize("slot", ["gradients", "parameters"])
def test_gossip_counts_its_neighbours(slot: str) -> None:
    strategy = hocket.compose(
        {slot: [{"collective": "gossip", "topology": "complete", "segments": "layers"}]}
    )
    planned = plan(strategy, model_of("cnn")[0], 4, NETWORK)

    def measure() -> tuple[float, int]:
        _, session = train("cnn", strategy, 2)
        [opened] = inner_of(session).phase.opened
        channel = opened.channel
        assert isinstance(channel, GossipChannel)
        received = sum(array.nbytes for arrays in channel._received.values() for array in arrays)
        return session.counters.bytes_sent / 2, received

    wire_bytes = sum(layout.wire_bytes for layout in planned.exchanges[0].layouts)
    own_bytes = buffer_bytes(planned.exchanges[0].exchange, planned.exchanges[0].layouts)
    assert planned.bytes_per_step == 3 * wire_bytes
    assert planned.memory_bytes == own_bytes + 3 * wire_bytes
    assert hocket.virtual(4).run(measure) == [(planned.bytes_per_step, 3 * wire_bytes)] * 4


def test_memory_in_multiples_of_the_model() -> None:
    model, _ = model_of("mlp")

    def models(*overrides: str) -> float:
        planned = plan(load_run({}, overrides).strategy, model, 4, NETWORK)
        return planned.in_models(planned.memory_bytes)

    assert models("recipe=sgd") == pytest.approx(2, rel=0.05)
    assert models("recipe=agd") == pytest.approx(2, rel=0.05)
    assert models("recipe=periodic_average") == pytest.approx(1, rel=0.05)
    assert models("recipe=periodic_average", "parameters.0.delay=1") == pytest.approx(2, rel=0.05)
    assert models("recipe=local") == 0


def test_sixteen_bits_travel_as_thirty_two() -> None:
    model = nn.Linear(320, 320, bias=False, dtype=torch.float16)
    numel = 320 * 320
    gradients = plan(hocket.compose("sgd"), model, 4, NETWORK)
    assert gradients.model_bytes == 2 * numel
    assert gradients.bytes_per_step == pytest.approx(2 * 3 / 4 * 4 * numel, rel=1e-3)
    # Sent and received in 32 bits, and handed to the optimizer in 16.
    assert gradients.in_models(gradients.memory_bytes) == pytest.approx(5, rel=1e-3)
    parameters = plan(hocket.compose("periodic_average"), model, 4, NETWORK)
    assert parameters.in_models(parameters.memory_bytes) == pytest.approx(4, rel=1e-3)


def test_every_log2_ranks_depends_on_their_number() -> None:
    strategy = load_run("periodic_average", ["parameters.0.every=log2_ranks"]).strategy
    for ranks, steps in ((2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)):
        planned = plan(strategy, nn.Linear(16, 16, bias=False), ranks, NETWORK)
        assert planned.bytes_per_step == pytest.approx(2 * (ranks - 1) / ranks * 1024 / steps)


@given(ranks=st.integers(2, 64), every=st.integers(1, 20))
def test_what_is_not_done_in_every_step_is_shared_out(ranks: int, every: int) -> None:
    model = nn.Linear(16, 16, bias=False)
    strategy = load_run("periodic_average", [f"parameters.0.every={every}"]).strategy
    planned = plan(strategy, model, ranks, NETWORK)
    assert planned.bytes_per_step == pytest.approx(2 * (ranks - 1) / ranks * 1024 / every)
    [exchange] = planned.exchanges
    round_s = exchange.exchange.collective.cost(1024, ranks, None, NETWORK).seconds
    assert planned.seconds_per_step == pytest.approx(round_s / every)
    assert exchange.scopes == (tuple(range(ranks)),)


def test_one_rank_exchanges_nothing() -> None:
    planned = plan(hocket.compose("agd"), nn.Linear(4, 4), 1, NETWORK)
    assert (planned.bytes_per_step, planned.seconds_per_step, planned.memory_bytes) == (0, 0, 0)


def test_nothing_trainable_is_planned_for_too() -> None:
    planned = plan(hocket.compose("sgd"), nn.ReLU(), 4, NETWORK)
    assert (planned.model_bytes, planned.memory_bytes, planned.in_models(0)) == (0, 0, 0)


def test_the_command_shows_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command("agd", ("task.network=cnn",), 3)
    shown = capsys.readouterr().out
    assert shown.startswith("agd: Synchronous SGD whose gradients are summed in buckets, each while")
    assert "3 ranks; task digits: 13,706 trainable parameters, 54.8 kB" in shown
    header, row = (line for line in shown.splitlines() if re.match(r"exchange |gradients", line))
    assert re.split(r"  +", row) == [
        *("gradients.0", "allreduce", "world: 3 ranks", "1 (bytes {size_mb: 8.0, first_mb: 1.0})", "54.9 kB"),
        *("step", "backward", "73.2 kB", "128 us", "2.00 x"),
    ]
    assert len(re.split(r"  +", header)) == 10
    for word in ("Sent:", "Time: for a latency of ", "Memory: send and receive buffers"):
        assert f"- {word}" in shown
    assert "\x1b" not in shown


def test_the_command_adds_exchanges_up(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command("sgd", ("parameters=[{collective: broadcast, every: 4}]",), None)
    shown = capsys.readouterr().out
    assert "4 ranks" in shown
    assert re.search(r"^parameters\.0 +broadcast .* 4 steps ", shown, re.MULTILINE)
    assert re.search(r"^together .* 2\.0\d x$", shown, re.MULTILINE)
    assert "averaged over the steps" in " ".join(shown.split())


def test_injected_delays_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command("sgd", ("delays={name: shifting_skew, shortest_s: 0.1, longest_s: 0.4}",), 4)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "Injected delays, shifting_skew {shortest_s: 0.1, longest_s: 0.4}: they delay a rank by 250 ms"
        in shown
    )
    assert "and by 400 ms if all ranks wait for each other in every step." in shown
    with pytest.raises(
        CompositionError, match=r"^delays do not fit 2 ranks: ranks is \[3\]; allowed: ranks from 0 to 1$"
    ):
        plan_command("sgd", ("delays={name: fixed, ranks: [3], seconds: 1}",), 2)


def test_the_files_own_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    plan_command("local", ("ranks=7",), None)
    assert "7 ranks" in capsys.readouterr().out


def test_a_model_that_looks_at_its_values_is_built_for_real(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "looking_task.py").write_text(
        "from dataclasses import dataclass\nfrom hocket.task import Digits\n\n@dataclass(frozen=True)\n"
        "class Looking(Digits):\n    def model(self):\n        model = super().model()\n"
        "        assert next(model.parameters()).sum().item() != 0\n        return model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plan_command("sgd", ("task=looking_task:Looking",), None)
    assert "9,610 trainable parameters" in capsys.readouterr().out


def test_mistakes_are_refused() -> None:
    with pytest.raises(CompositionError, match=r"gradients\.0\.overlap"):
        plan_command("agd", ("gradients.0.overlap=forward",), None)
    with pytest.raises(ConfigError, match="Invalid learning rate"):
        plan_command("agd", ("optimizer.lr=-1",), None)


def test_on_a_terminal_it_is_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    plan_command("sgd", (), None)
    assert re.search(r"│ gradients\.0 +│ allreduce +│", capsys.readouterr().out)


def test_no_sample_is_read_and_no_mpi_started() -> None:
    code = (
        "import sys; from hocket.task import Digits; Digits.data = None\n"
        "from hocket.cli.planning import plan_command; plan_command('sgd', (), 2)\n"
        "assert not any(name.startswith('mpi4py') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_hosts_are_groups_as_their_sizes_are() -> None:
    by_host = hocket.compose("hierarchical_sgd", "gradients.0.segments=layers")
    slots = [f"gradients.{place}.over={{size: 4, by: null}}" for place in (0, 1)]
    by_size = hocket.compose("hierarchical_sgd", "gradients.0.segments=layers", *slots)
    with torch.device("meta"):
        model = model_of("cnn")[0]
    planned = plan(by_host, model, Placement.of("aaaabbbb"), NETWORK)
    sent = hocket.virtual(8).run(lambda: train("cnn", by_size, 2)[1].counters.bytes_sent / 2)
    assert planned.bytes_per_step == pytest.approx(sum(sent) / 8, rel=1e-12)
    assert (
        planned.seconds_per_step == plan(by_size, model, Placement.of("aaaabbbb"), NETWORK).seconds_per_step
    )
    assert [len(each.scopes) for each in planned.exchanges] == [2, 1, 2]


def test_several_recipes_are_planned_with_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["sgd", "hierarchical_sgd", "dpsgd", "periodic_average"]
    plan_several(names, ("task.network=cnn",), None, parse_hosts("2x4"))
    shown = capsys.readouterr().out
    assert shown.startswith("8 ranks on 2 hosts; task digits: ")
    rows = {
        line.split()[0]: re.split(r"  +", line) for line in shown.splitlines() if line.split("  ")[0] in names
    }
    assert list(rows) == names
    for name, row in rows.items():
        plan_command(name, ("task.network=cnn",), None, parse_hosts("2x4"))
        alone = capsys.readouterr().out
        assert "8 ranks on 2 hosts; task digits" in alone
        last = [
            line
            for line in alone.splitlines()
            if line.startswith(("together", "gradients.0", "parameters.0"))
        ][-1]
        assert re.split(r"  +", last)[-3:] == row[-3:]


def test_a_recipe_may_have_overrides_of_its_own(hocket: Callable[..., Any]) -> None:
    variant = "periodic_average parameters.0.every=2 network={latency_s: 1ms}"
    several = hocket("plan", "periodic_average", variant, "task.network=cnn", "batch_size = 8")
    assert several.status == 0, several.err
    sent = {}
    for words in (
        ["periodic_average"],
        ["periodic_average", "parameters.0.every=2", "network={latency_s: 1ms}"],
    ):
        sent[len(words)] = re.search(r"parameters\.0 .*", hocket("plan", *words, "task.network=cnn").out)
    assert variant.split()[1] in several.out
    alone = hocket("plan", variant, "task.network=cnn").out
    assert sent[3] is not None
    assert sent[3][0] in alone
    assert sent[1] is not None
    assert sent[1][0] not in alone
    twice = hocket("plan", variant, "sgd", "parameters.0.every=3")
    assert twice.err == f"hocket: parameters.0.every is given twice: in {variant!r}, and by itself\n"


def test_a_pipeline_is_not_planned_by_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "data_size", lambda self, size: size // 2)
    with pytest.raises(UserError, match="--hosts: engine data_parallel divides the model over ranks"):
        plan_command("sgd", (), None, parse_hosts("2x4"))


@pytest.mark.parametrize("recipe", ["hierarchical_sgd", "sgp"])
def test_nothing_is_cut_on_80_columns(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_command(recipe, (), 8)
    words = {*capsys.readouterr().out.split()}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    plan_command(recipe, (), 8)
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert max(map(len, drawn.splitlines())) <= 80
    assert words <= {*drawn.split()}
    assert "…" not in drawn


def test_a_plan_takes_what_recommend_takes(capsys: pytest.CaptureFixture[str]) -> None:
    result = CliRunner().invoke(
        cli,
        ["plan", "sgd", "-n", "4", "--params", "25M", "--bandwidth", "1gbit", "--latency", "50us"],
        catch_exceptions=False,
    )
    assert "4 ranks; 24 equal matrices: 24,969,600 trainable parameters" in result.output
    assert "for a latency of 50 us and 1 Gbit/s per rank" in " ".join(result.output.split())
    # A ring's 2 (p - 1) / p of 100 MB at 125 MB a second.
    assert "1.2 s" in result.output
    several = CliRunner().invoke(
        cli, ["plan", "sgd", "agd", "-n", "4", "--params", "25M"], catch_exceptions=False
    )
    assert "24 equal matrices" in several.output
    with pytest.raises(UserError, match=r"^--bandwidth: got '100'; allowed: a number with kbit"):
        CliRunner().invoke(cli, ["plan", "sgd", "--bandwidth", "100"], catch_exceptions=False)


def test_the_share_of_computing_counts_who_is_late(capsys: pytest.CaptureFixture[str]) -> None:
    late = "delays={name: fixed, ranks: [0], seconds: 300ms}"
    plan_command("sgd", ("compute.step_s=100ms", late), 4)
    told = " ".join(capsys.readouterr().out.split())
    # 0.1 s of 0.4 s, and the messages of the digits take next to nothing.
    assert re.search(
        r"takes 40\d ms, 300 ms of this time waiting for late ranks. Computing is 2[45]\.\d% of it", told
    )
    assert "; by bandwidth per rank: 50% never. " in told
    plan_command("agd", ("compute.step_s=100ms",), 4)
    # The only bucket, 9,610 numbers, is sent when backward has ended: 1.5 times 38 KB in 0.9 ms, beside latency.
    assert "95% from 0.1 Gbit/s or less, 99% from 0.543 Gbit/s on" in " ".join(
        capsys.readouterr().out.split()
    )
    plan_several(("sgd", "agd"), ("compute.step_s=100ms", late), 4, ())
    assert re.search(r"sgd .* 25%", capsys.readouterr().out)


def test_the_first_exchange_that_takes_place_has_the_buffers() -> None:
    net = nn.Linear(100, 100)
    hierarchical, plain = (
        plan(hocket.compose(name), net, Placement.of_counts([1] * 4), NETWORK).memory_bytes
        for name in ("hierarchical_sgd", "sgd")
    )
    assert hierarchical == plain > 0


def test_a_run_of_islands_is_planned_as_the_option_says(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        return (
            CliRunner().invoke(cli, ["plan", "agd", *words, "--params", "1M"], catch_exceptions=False).output
        )

    assert told("-n", "8", "--island", "2") == told("-n", "8", "island.shard=2")
    assert "8 ranks in 4 islands of 2; 24 equal matrices" in told("-n", "8", "island.shard=2")
    assert "8 ranks; 24 equal matrices" in told("-n", "8", "--island", "1", "island.shard=2")
    # Ranks that average gradients by HSDP hold as much as one of them, and share the link with it.
    assert "2 islands of 4" in told("-n", "8", "island={shard: 2, replicate: 2}")
