"""Moves that a session may refuse, as users make them, and the words that the error must have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from machine.moves import Attach, Refuse, Step, Way
from machine.strategies import Entry
from machine.toy import batch_of, loss_of, optimizers_for

if TYPE_CHECKING:
    from machine.script import Script


@dataclass(frozen=True)
class Refusal:
    """A move that is refused.

    Attributes:
        do: does it, on each rank.
        says: what the error says, one of these words at least.
        attached: whether a session is needed; else none must be there.
        several: whether it takes more than one rank.
        others: whether the other ranks are told, and not the one that does it.
        fits: whether a strategy refuses it.
    """

    do: Callable[[Script, Refuse], None]
    says: tuple[str, ...]
    attached: bool = True
    several: bool = False
    others: bool = False
    fits: Callable[[Entry], bool] = lambda entry: True


def _train_on(script: Script, move: Refuse) -> None:
    for number in range(2):
        script.perform_step(Step(move.seed + number))
    script.session.close()


def _attach_again(script: Script, move: Refuse) -> None:
    script.attach(Attach("sgd"))
    _train_on(script, move)


def _share(script: Script, move: Refuse) -> None:
    script.replica.model.share_memory()
    _train_on(script, move)


def _zip(script: Script, move: Refuse) -> None:
    own = [batch_of(move.seed, script.rank, number, Way().users) for number in range(2)]
    for batch, _ in zip(script.session.data(own), script.session.data(own), strict=True):
        script.batch(Step(move.seed), batch, 0, False)


def _add(script: Script, move: Refuse) -> None:
    script.replica.model.added = nn.Linear(4, 4, dtype=torch.float64)
    script.replica.optimizers[0].add_param_group({"params": list(script.replica.model.added.parameters())})
    _train_on(script, move)


def _replace(script: Script, move: Refuse) -> None:
    script.replica.model.last.weight = nn.Parameter(script.replica.model.last.weight.detach().clone())
    _train_on(script, move)


def _replace_module(script: Script, move: Refuse) -> None:
    script.replica.model.last = nn.Linear(6, 4, dtype=torch.float64)
    _train_on(script, move)


def _cast(script: Script, move: Refuse) -> None:
    model = script.replica.model.float()
    for number in range(2):
        x, classes, uses_beside = batch_of(move.seed, script.rank, number, Way().users)
        script.replica.optimizers[0].zero_grad()
        nn.functional.cross_entropy(model(x.float(), uses_beside), classes).backward()
        script.replica.optimizers[0].step()
    script.session.close()


def _alias(script: Script, move: Refuse) -> None:
    model = script.replica.model
    model.first.weight = nn.Parameter(model.beside.weight.detach().view(-1)[:30].view(6, 5))
    script.replica.optimizers = optimizers_for("sgd", model)
    script.attach(Attach("sgd"))


def _break(script: Script, move: Refuse) -> None:
    own = [batch_of(move.seed, script.rank, number, Way().users) for number in range(3)]
    for number, batch in enumerate(script.session.data(own)):
        script.batch(Step(move.seed), batch, 0, False)
        if number == 0 and script.rank == move.rank:
            break
    script.session.close()


def _reorder(script: Script, move: Refuse) -> None:
    model = script.replica.model
    if script.rank == move.rank:
        model._modules["beside"] = model._modules.pop("beside")
        script.replica.optimizers = optimizers_for(script.optimizer, model)
    script.attach(Attach("sgd"))


def _other_rate(script: Script, move: Refuse) -> None:
    for group in script.replica.optimizers[0].param_groups if script.rank == move.rank else ():
        group["lr"] *= 2
    script.attach(Attach("sgd"))


def _enter_again(script: Script, move: Refuse) -> None:
    session: Any = script.session
    session.__exit__(ValueError, ValueError(), None)
    with session:
        _train_on(script, move)


def _save_too_early(script: Script, move: Refuse) -> None:
    with script.session.accumulate():
        loss_of(script.replica.model, batch_of(move.seed, script.rank, 0, Way().users)).backward()
    script.session.save(script.folder)


def _weigh_by_nan(script: Script, move: Refuse) -> None:
    own = [batch_of(move.seed, script.rank, 0, Way().users)]
    weight = float("nan") if script.rank == move.rank else 1.0
    for batch in script.session.data(own, weight=lambda _: weight):
        script.batch(Step(move.seed), batch, 0, False)
    script.session.close()


def _use_closed(script: Script, move: Refuse) -> None:
    script.session.close()
    script.session.consensus()


def _step_by_closure(script: Script, move: Refuse) -> None:
    script.perform_step(Step(move.seed, Way("closure")))


def _pushes_weights(entry: Entry) -> bool:
    mixings = [rule.parameters for rule in entry.rules.values()]
    return any(mixing is not None and mixing.pushes and not mixing.is_fair for mixing in mixings)


REFUSALS: dict[str, Refusal] = {
    "attach_again": Refusal(_attach_again, ("session",)),
    "share_memory": Refusal(_share, ("memory",)),
    "zip": Refusal(_zip, ("loader", "session.data")),
    "add": Refusal(_add, ("added",)),
    "replace": Refusal(_replace, ("last.weight",)),
    "replace_module": Refusal(_replace_module, ("last",)),
    "cast": Refusal(_cast, ("float32",)),
    "alias": Refusal(_alias, ("first.weight", "beside.weight"), attached=False),
    "break": Refusal(_break, ("left the loop",), several=True, others=True),
    "reorder": Refusal(_reorder, ("order",), attached=False, several=True),
    "other_rate": Refusal(_other_rate, ("lr",), attached=False, several=True),
    "enter_again": Refusal(_enter_again, ("session",)),
    "save_too_early": Refusal(_save_too_early, ("accumul",)),
    "weigh_by_nan": Refusal(_weigh_by_nan, ("weight",)),
    "closure": Refusal(_step_by_closure, ("closure",), several=True, fits=_pushes_weights),
    "use_closed": Refusal(_use_closed, ("closed",)),
}
