"""Optimizers by name: built as torch builds them, and refused before torch would."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hocket.config.optimizer import build_optimizer, build_optimizers, complete_arguments
from hocket.config.reference import Reference
from hocket.errors import ConfigError
from hocket.training.run import load_run, resolved


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


def test_an_optimizer_is_torchs_own_with_the_arguments_given() -> None:
    run = load_run("sgd", ["optimizer={name: adamw, lr: 1e-3, betas: [0.8, 0.9]}"])
    optimizer = build_optimizer(run.optimizer, parameters())
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["lr"] == 1e-3
    assert optimizer.defaults["betas"] == (0.8, 0.9)


@pytest.mark.usefixtures("with_muon")
def test_a_name_is_understood_in_any_case() -> None:
    run = load_run("sgd", ["optimizer={name: Muon, rest: {name: AdamW}}"])
    assert type(build_optimizer(run.optimizer.nested("rest"), parameters())) is torch.optim.AdamW
    written = resolved(run)["optimizer"]
    assert (written["name"], written["rest"]["name"]) == ("muon", "adamw")


def test_parameter_groups_are_passed_on() -> None:
    groups = [{"params": parameters(), "lr": 0.5}]
    assert build_optimizer(Reference("sgd", {"lr": 0.1}), groups).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam"])
def test_complete_arguments_build_the_same(name: str) -> None:
    complete = complete_arguments(Reference(name, {"lr": 0.25}))
    assert complete["lr"] == 0.25
    matrix = [torch.nn.Parameter(torch.ones(2, 2))]
    direct = build_optimizer(Reference(name, {"lr": 0.25}), matrix)
    assert build_optimizer(Reference(name, complete), matrix).defaults == direct.defaults


@pytest.mark.usefixtures("with_muon")
def test_complete_arguments_of_muon_build_the_same() -> None:
    test_complete_arguments_build_the_same("muon")


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("sdg", "mapping: optimizer: there is no optimizer 'sdg'. Did you mean 'sgd'? Allowed: adadelta, "),
        ({"name": "lbfgs"}, "mapping: optimizer.name: there is no optimizer 'lbfgs'; allowed: "),
        (
            {"name": "sgd", "lrr": 1},
            "mapping: optimizer.lrr: unknown argument of sgd. Did you mean 'lr'? Allowed: lr, momentum, ",
        ),
        ({"name": "sgd", "lr": "fast"}, "mapping: optimizer.lr: got 'fast'; allowed: a number"),
        ({"name": "sgd", "lr": True}, "mapping: optimizer.lr: got true; allowed: a number"),
        ({"name": "sgd", "nesterov": 1}, "mapping: optimizer.nesterov: got 1; allowed: true or false"),
        ({"name": "sgd", "lr": -1}, "mapping: optimizer: sgd refuses lr: -1: Invalid learning rate: -1"),
        ({"name": "adam", "betas": 3}, "mapping: optimizer: adam refuses betas: 3: "),
    ],
)
def test_a_mistake_is_refused_with_its_place(optimizer: Any, expected: str) -> None:
    run = load_run({"optimizer": optimizer})
    with pytest.raises(ConfigError) as caught:
        build_optimizer(run.optimizer, parameters())
    assert str(caught.value).startswith(expected)


def test_a_misspelt_argument_and_name_get_a_suggestion() -> None:
    for optimizer, hint in (({"name": "sgd", "lrr": 1}, "'lr'"), ("adamm", "'adam'")):
        with pytest.raises(ConfigError, match=rf"\. Did you mean {hint}\? Allowed: "):
            build_optimizer(load_run({"optimizer": optimizer}).optimizer, parameters())


def test_a_reference_made_in_code_says_so() -> None:
    with pytest.raises(ConfigError, match=r"^in code: momentun: unknown argument of sgd"):
        build_optimizer(Reference("sgd", {"momentun": 1}), parameters())


def test_an_optimizer_of_ones_own_is_named_by_its_module() -> None:
    run = load_run({"optimizer": {"name": "torch.optim:Adagrad", "lr": 0.5}})
    assert type(build_optimizer(run.optimizer, parameters())) is torch.optim.Adagrad
    assert complete_arguments(run.optimizer)["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("torch.optim:Adagrat", "cannot import the optimizer 'torch.optim:Adagrat': "),
        (
            "no_such_module:LARS",
            "cannot import the optimizer 'no_such_module:LARS': ModuleNotFoundError: No module",
        ),
        ("torch.nn:Linear", "'torch.nn:Linear' is not a subclass of torch.optim.optimizer.Optimizer"),
    ],
)
def test_what_is_no_optimizer_of_ones_own(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer(load_run({"optimizer": {"name": name}}).optimizer, parameters())
    assert str(caught.value).startswith(f"mapping: optimizer.name: {problem}")


class Tied(torch.nn.Module):
    """An embedding, two hidden layers and norms, and a head that is the embedding, or is not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 3)
        self.first, self.norm, self.second = (
            torch.nn.Linear(3, 4),
            torch.nn.LayerNorm(4),
            torch.nn.Linear(4, 3),
        )
        self.convolution = torch.nn.Conv1d(3, 3, 2)
        self.head = torch.nn.Linear(3, 5)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.usefixtures("with_muon")
@pytest.mark.parametrize("tied", [False, True])
def test_the_rest_is_all_but_hidden_matrices(tied: bool) -> None:
    model = Tied(tied=tied)
    run = load_run({"optimizer": {"name": "muon", "lr": 0.02, "rest": {"name": "adamw", "lr": 1e-3}}})
    muon, adamw = build_optimizers(run.optimizer, model)
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    assert (muon.defaults["lr"], adamw.defaults["lr"]) == (0.02, 1e-3)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [names[p] for p in muon.param_groups[0]["params"]] == ["first.weight", "second.weight"]
    others = [name for name in names.values() if name not in ("first.weight", "second.weight")]
    assert [names[p] for p in adamw.param_groups[0]["params"]] == others


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ({"name": "muon"}, "mapping: optimizer: muon takes only matrices: add rest: {name: adamw}, which steps all "),
        ({"name": "muon", "rest": "adamv"}, "mapping: optimizer.rest: there is no optimizer 'adamv'. Did you mean "),
        ({"name": "muon", "rest": {"name": "sgd", "lrr": 1}}, "mapping: optimizer.rest.lrr: unknown argument of sgd. "),
        ({"name": "muon", "rest": {"lr": 1}}, "mapping: optimizer.rest: this mapping has no `name`; write {name"),
        ({"name": "muon", "rest": {"name": "muon", "rest": "sgd"}}, "mapping: optimizer.rest.rest: rest is not "),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("with_muon")
def test_a_mistake_in_the_rest_is_refused_with_its_place(optimizer: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizers(load_run({"optimizer": optimizer}).optimizer, Tied(tied=False))
    assert str(caught.value).startswith(expected)


@pytest.mark.usefixtures("with_muon")
def test_a_model_without_hidden_matrices_is_refused() -> None:
    reference = load_run({"optimizer": {"name": "muon", "rest": "adamw"}}).optimizer
    with pytest.raises(ConfigError, match=r"optimizer.rest: the model has no hidden matrix for muon"):
        build_optimizers(reference, torch.nn.Linear(2, 2))


@pytest.mark.parametrize("reverse", [False, True])
def test_an_override_outlasts_that_of_what_contains_it(reverse: bool) -> None:
    """On either side of it: `optimizer={...}` after `optimizer.lr=0.25` says nothing of the rate."""
    overrides = ["optimizer.lr=0.25", "optimizer={name: sgd, momentum: 0.5}"]
    arguments = load_run("agd", sorted(overrides, reverse=reverse)).optimizer.arguments
    assert (arguments["lr"], arguments["momentum"]) == (0.25, 0.5)
