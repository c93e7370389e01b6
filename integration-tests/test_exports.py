"""Exports of several strategies' runs, read by plain torch, safetensors, DCP, transformers and peft: the consensus."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from islands import run_once
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load

import hocket
from hocket.cli.exporting import export_command
from hocket.session.save.saved_model import open_checkpoint
from hocket.testing.session import inner_of

STRATEGIES = {
    "sgd": ["sgd"],
    "dpsgd": ["dpsgd"],
    "sgp": ["sgp"],
    "diloco": ["diloco", "parameters.0.every=2"],
    "streaming": ["diloco.streaming", "parameters.0.every=4", "parameters.0.segments.count=2"],
    "noloco": ["diloco.noloco", "parameters.0.every=2"],
    "redsync": ["redsync"],
    "powersgd": ["powersgd"],
}
#: Whose mean is a sum in another order.
ROUNDED = ("dpsgd", "sgp", "noloco")
STEPS = 7  # one of them after the last exchange of outer parameters


def made(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def trained(folder: Path, strategy: list[str]) -> dict[str, Tensor]:
    """Train, export in two formats, save, and return the consensus."""
    generator = torch.Generator().manual_seed(hocket.join().rank)
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            x, y = torch.randn(8, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        session.export(folder / "safetensors")
        session.export(folder / "dcp", "dcp")
        session.save(folder / "checkpoints")
        with session.consensus():
            return {name: value.clone() for name, value in model.state_dict().items()}


def same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return given.keys() == expected.keys() and all(
        torch.equal(given[name], expected[name]) for name in expected
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", STRATEGIES)
def test_all_read_the_consensus(name: str, tmp_path: Path) -> None:
    expected, *_ = hocket.virtual(4).run(lambda: trained(tmp_path, STRATEGIES[name]))
    model = made(1)
    model.load_state_dict(load_file(tmp_path / "safetensors/model.safetensors"))
    assert same(model.state_dict(), expected)
    state = {"model": made(2).state_dict()}
    load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state["model"], expected)
    with open_checkpoint(tmp_path / f"checkpoints/step-{STEPS:08d}") as saved:
        assert not saved.has_pending  # which is in the consensus, and in no rank's parameters
        given = {each: saved.tensors.value(each) for each in saved.tensors.forms}
    bound = 1e-6 if name in ROUNDED else 0.0
    parameters = [each for each, _ in model.named_parameters()]
    assert max(float((given[each] - expected[each]).abs().max()) for each in parameters) <= bound
    statistics = [each for each in given if "running" in each]  # of each rank's batches: a mean everywhere
    assert max(float((given[each] - expected[each]).abs().max()) for each in statistics) <= 1e-6


pytest_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def language(seed: int) -> Any:
    from idioms.small_language import small_language

    torch.manual_seed(seed)
    return small_language()


class Tokenizer:
    """What goes along."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "tokenizer.json").write_text("{}")


def tune(model: Any, use: Any, strategy: tuple[str, ...] = ("dpsgd",), steps: int = 3) -> Any:
    generator = torch.Generator().manual_seed(hocket.join().rank)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.5)
    with hocket.attach(model, optimizer, hocket.compose(*strategy)) as session:
        for _ in range(steps):
            optimizer.zero_grad()
            tokens = torch.randint(0, model.config.vocab_size, (2, 6), generator=generator)
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        use(session)
        with session.consensus():
            return {name: value.clone() for name, value in model.state_dict().items()}


@pytest_transformers
def test_from_pretrained_reads_an_export(tmp_path: Path) -> None:
    def use(session: hocket.Session) -> None:
        session.export(tmp_path / "out", "hf", also=[Tokenizer()])

    expected, _ = hocket.virtual(2).run(lambda: tune(language(0), use))
    given = type(language(1)).from_pretrained(tmp_path / "out")
    assert same(given.state_dict(), expected)
    assert (tmp_path / "out/tokenizer.json").exists()


def by_torch(folder: Path) -> dict[str, Tensor]:
    dcp_to_torch_save(folder / "dcp", folder / "whole.pt")
    state: dict[str, Tensor] = torch.load(folder / "whole.pt", weights_only=True)["model"]
    return state


def by_safetensors(folder: Path) -> dict[str, Tensor]:
    model: nn.Module = language(1)
    model.load_state_dict(load_file(folder / "safetensors/model.safetensors"))
    return model.state_dict()


def by_transformers(folder: Path) -> dict[str, Tensor]:
    model: nn.Module = type(language(1)).from_pretrained(folder / "hf")
    return model.state_dict()


def by_fsdp2(ranks: int, folder: Path) -> dict[str, Tensor]:
    run_once(folder.parent, "read", ranks, [folder.name])
    state: dict[str, Tensor] = torch.load(folder / f"{ranks}.pt", weights_only=True)
    return state


READERS = {
    "torch": by_torch,
    "safetensors": by_safetensors,
    "transformers": by_transformers,
    "FSDP2 on 2 ranks": partial(by_fsdp2, 2),
    "FSDP2 on 3 ranks": partial(by_fsdp2, 3),
}


@pytest_transformers
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.one_of_each
@pytest.mark.parametrize("name", ["sgd", "dpsgd", "sgp", "diloco", "redsync", "powersgd"])
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_each_reader_gets_the_bits_of_each_strategy(
    reader: Callable[[Path], dict[str, Tensor]], name: str, tmp_path: Path
) -> None:
    """A language model of four ranks, which hold other values than their consensus or not."""
    folder = tmp_path / name

    def use(session: hocket.Session) -> None:
        for format in ("safetensors", "dcp", "hf"):
            session.export(folder / format, format)

    expected, *_ = hocket.virtual(4).run(lambda: tune(language(0), use, tuple(STRATEGIES[name]), STEPS))
    begun = language(0).state_dict()
    assert all(not torch.equal(begun[each], expected[each]) for each in expected)
    assert same(reader(folder), expected)


@pytest_transformers
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft's, of its transformers
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_peft_reads_an_exported_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted() -> Any:
        torch.manual_seed(3)
        config = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
        return get_peft_model(language(0), config)

    def use(session: hocket.Session) -> None:
        session.export(tmp_path / "out", "hf")

    expected, _ = hocket.virtual(2).run(lambda: tune(adapted(), use))
    given = PeftModel.from_pretrained(language(0), str(tmp_path / "out"))
    assert same(given.state_dict(), expected)
    assert (tmp_path / "out/adapter_config.json").exists()


# ---- what the strategy keeps beside the model ----------------------------------------------------------------------

KEEPING = {
    "sgp": ["sgp", "parameters.0.topology=irregular_directed"],
    "diloco": ["diloco", "parameters.0.every=2"],
    "noloco": ["diloco.noloco", "parameters.0.every=2"],
    "redsync": ["redsync", "gradients.0.compressor={name: redsync.exact, density: 0.2, dense_below_kb: 0}"],
}


def held_by(session: hocket.Session) -> dict[str, Tensor]:
    """Return the strategy's tensors in the session, in the shapes of the parameters."""
    parameters = dict(session.model.named_parameters())
    found: dict[str, Tensor] = {}

    def keep(exchange: str, kind: str, flat: Tensor, segment: Any) -> None:
        for span in segment.spans:
            value = (
                parameters[span.name].detach().to(flat.dtype, copy=True)
            )  # in the parameter's order of elements
            value.as_strided((span.numel,), (1,)).copy_(flat[span.start : span.stop])
            found[f"{exchange}/{kind}/{span.name}"] = value

    phase = inner_of(session).phase
    for opened in phase.opened:
        for segment in opened.segments:
            packing = opened.channel.packing
            if packing is not None and (residual := packing.states[segment.index].residual) is not None:
                keep(opened.exchange.name, "residual", residual, segment)
    for mix in phase.parameters.exchanges:
        for segment in mix.opened.segments:
            if segment.index in mix.push_sum.weights:
                for span in segment.spans:
                    weight = torch.tensor(mix.push_sum.weights[segment.index], dtype=torch.float64)
                    found[f"{mix.opened.exchange.name}/weight/{span.name}"] = weight
            if segment.index in mix.outer:
                outer = mix.outer[segment.index]
                keep(mix.opened.exchange.name, "outer", outer.parameters, segment)
                for name, kept in outer.remembered.items():
                    found[f"{mix.opened.exchange.name}/outer.momentum/{name}"] = kept["momentum"].clone()
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", KEEPING)
def test_others_read_what_a_strategy_keeps(name: str, tmp_path: Path) -> None:
    """By DCP, in one process: what each rank's session holds, under its own key or `all`."""

    def on_rank() -> dict[str, Tensor]:
        rank = hocket.join().rank
        generator = torch.Generator().manual_seed(rank)
        torch.manual_seed(0)
        conv = nn.Conv2d(2, 4, 3)
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
        model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with hocket.attach(model, optimizer, hocket.compose(*KEEPING[name])) as session:
            for _ in range(5):
                optimizer.zero_grad()
                x, y = (
                    torch.randn(8, 2, 4, 4, generator=generator),
                    torch.randint(0, 3, (8,), generator=generator),
                )
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            held = held_by(session)
            session.save(tmp_path / "checkpoints")
            return held

    ranks = hocket.virtual(3).run(on_rank)
    assert any(not torch.equal(ranks[0][key], ranks[1][key]) for key in ranks[0]) == (name != "diloco")
    export_command(tmp_path / "checkpoints", tmp_path / "out", "dcp", True, None, None, None)
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    given = torch.load(tmp_path / "all.pt", weights_only=True)["strategy"]
    for rank, held in enumerate(ranks):
        assert held
        for key, expected in held.items():
            own = f"rank{rank:04d}/{key}"
            assert torch.equal(given[own if own in given else f"all/{key}"], expected), own
    who = {key.split("/")[0] == "all" for key in given if key.split("/")[2] in ("outer", "outer.momentum")}
    assert who == {"diloco": {True}, "noloco": {False}}.get(name, set())
    assert all("/outer" in key for key in given if key.startswith("all/"))
