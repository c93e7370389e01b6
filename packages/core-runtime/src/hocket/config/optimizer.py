"""The optimizers of torch.optim by their lower-case names, and others as `module:Class`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hocket.config.reference import Reference
from hocket.plain import Tree

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

_LEFT_OUT = ("params",)

#: The optimizer of what is no hidden matrix, as an argument of the one of those.
_REST = "rest"


def build_optimizers(reference: Reference, model: nn.Module) -> list[Optimizer]:
    """Build the optimizer that a config names, or two with `rest`: for hidden matrices, and for all else.

    Hidden matrices are parameters of two axes, but for those of embeddings and of the head, which is the last module
    that holds any.

    Args:
        model: on its device.

    Raises:
        ConfigError: as in `build_optimizer`; or the model has no hidden matrix.
    """
    if _REST not in reference.arguments:
        return [build_optimizer(reference, model.parameters())]
    hidden = _hidden_matrices(model)
    rest = [p for p in model.parameters() if not any(p is each for each in hidden)]
    if not hidden:
        problem = f"the model has no hidden matrix for {reference.name}: use only the optimizer in {_REST}"
        raise reference.where.child(_REST).error(problem)
    return [
        build_optimizer(reference.without(_REST), hidden),
        build_optimizer(reference.nested(_REST), rest),
    ]


def build_optimizer(reference: Reference, params: Iterable[Tensor] | Iterable[Tree]) -> Optimizer:
    """Build the one optimizer that a config names.

    Args:
        params: parameters or parameter groups, as torch takes them.

    Raises:
        ConfigError: no such optimizer, no such argument, a value that it refuses, or `rest`, which would be another
            one; names source and key.
    """
    optimizer = _find(reference)
    if _REST in reference.arguments:
        place = reference.where.child(_REST)
        raise place.error(
            "rest is not allowed here, as rest itself and the stages of a pipeline have a single optimizer: leave it "
            "out"
        )
    given = reference.check_arguments(optimizer, _LEFT_OUT)
    try:
        built: Optimizer = optimizer(params, **given)
    except (TypeError, ValueError) as error:
        written = ", ".join(f"{key}: {value}" for key, value in given.items()) or "no arguments"
        problem = f"{reference.name} refuses {written}: {error}"
        if "2D" in str(error):
            problem = (
                f"{reference.name} takes only matrices: add {_REST}: {{name: adamw}}, which steps all other "
                "parameters"
            )
        raise reference.where.error(problem) from error
    return built


def complete_arguments(reference: Reference) -> Tree:
    """Return all keyword arguments of the optimizer, with its defaults, as plain values.

    Raises:
        ConfigError: as in `build_optimizer`.
    """
    own = reference.without(_REST).complete_arguments(_find(reference), _LEFT_OUT)
    if _REST not in reference.arguments:
        return own
    rest = reference.nested(_REST)
    return {**own, _REST: {"name": rest.class_name, **complete_arguments(rest)}}


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    from torch import nn

    holders = [module for module in model.modules() if any(p.dim() == 2 for p in module.parameters(False))]
    outer = [m for m in holders if isinstance(m, nn.Embedding | nn.EmbeddingBag)] + holders[-1:]
    kept = {id(p) for module in outer for p in module.parameters(False)}
    return [p for p in model.parameters() if p.dim() == 2 and id(p) not in kept]


def _find(reference: Reference) -> type[Optimizer]:
    """Return the optimizer class that a reference names."""
    import torch

    # LBFGS evaluates the loss several times in a step, which a run's training loop does not offer it.
    return reference.find_class("optimizer", torch.optim.Optimizer, torch.optim, torch.optim.LBFGS)
