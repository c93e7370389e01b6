"""A model's state under the names that its user knows, without those of wrappers; and models that begin with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hocket.checkpoint.files import describe
from hocket.checkpoint.model_files import ModelTensors
from hocket.errors import CheckpointError, near_words, some

#: What torch's wrappers put into the names of what is within them: of compiled modules, FSDP1 and checkpointing.
_WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's model within DistributedDataParallel and compiled modules."""
    while True:
        inner = (
            model.module
            if isinstance(model, DistributedDataParallel | DataParallel)
            else model._modules.get("_orig_mod")
        )
        if inner is None:
            return model
        model = inner


def users_name(name: str) -> str:
    """Return the name of a parameter, buffer or state without the parts that wrappers within the model add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def state_names(model: nn.Module) -> dict[str, str]:
    """Return the names in `model_state`, each with `parameters/` or `buffers/` and the name of the tensor in the model.

    `state_dict` is not called: sessions finish exchanges when it is.
    """
    held = {id(p): f"parameters/{name}" for name, p in model.named_parameters()}
    held |= {id(buffer): f"buffers/{name}" for name, buffer in model.named_buffers()}
    names = {}
    for path, module in unwrapped(model).named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and key not in left_out:
                names[users_name(f"{path}.{key}".lstrip("."))] = held[id(tensor)]
    return names


def model_state(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return `model.state_dict()` under the names of the model without wrappers.

    Args:
        model: the model, perhaps in wrappers.
        keep_vars: whether to return the model's own tensors, and not detached ones.
    """
    state = unwrapped(model).state_dict(keep_vars=keep_vars)
    return {users_name(name): value for name, value in state.items()}


@torch.no_grad()
def load_model(model: nn.Module, given: ModelTensors, where: str) -> None:
    """Set a model to tensors that somebody has written; they are converted to its dtypes.

    Tied tensors may be given under one of their names. All names may have a prefix in common, such as `module.`.

    Args:
        model: the model; it stays as it was if the tensors do not fit.
        given: the tensors.
        where: their origin, for the error.

    Raises:
        CheckpointError: names or shapes differ; names the first few, and near ones.
    """
    held = {n: t for n, t in model_state(model, keep_vars=True).items() if isinstance(t, Tensor)}
    prefix = _prefix(held, given.forms)
    names = {name: _given_name(name, held, prefix, given.forms) for name in held}
    _require_fit(held, given.forms, names, prefix, where)
    for name, tensor in held.items():
        found = names[name]
        assert found is not None
        tensor.copy_(given.value(found))


def _prefix(held: Mapping[str, Tensor], forms: Mapping[str, Tensor]) -> str:
    """Return what all given names begin with beside the model's own: that with which most of these are there."""
    candidates = {""} | {
        name[: -len(own)] for own in list(held)[:3] for name in forms if name.endswith(f".{own}")
    }
    return max(sorted(candidates, key=len), key=lambda each: sum(each + own in forms for own in held))


def _given_name(
    name: str, held: Mapping[str, Tensor], prefix: str, forms: Mapping[str, Tensor]
) -> str | None:
    """Return the given name of a tensor, or of one that it is tied to; None if there is none."""
    if prefix + name in forms:
        return prefix + name
    tied = (other for other, tensor in held.items() if tensor is held[name] and prefix + other in forms)
    found = next(tied, None)
    return None if found is None else prefix + found


def _require_fit(
    held: Mapping[str, Tensor],
    forms: Mapping[str, Tensor],
    names: Mapping[str, str | None],
    prefix: str,
    where: str,
) -> None:
    unknown = [
        name for name in forms if not (name.startswith(prefix) and users_name(name[len(prefix) :]) in held)
    ]
    missing = [name for name, found in names.items() if found is None]
    shapes = [
        f"{name} is {describe(forms[found])}, but {describe(held[name])} in the model"
        for name, found in names.items()
        if found is not None and forms[found].shape != held[name].shape
    ]
    problems = [
        *(["it lacks the model's " + _with_near(missing, unknown)] if missing else []),
        *(["the model has no " + _with_near(unknown, missing or list(held))] if unknown else []),
        *([some(shapes)] if shapes else []),
    ]
    if problems:
        raise CheckpointError(f"{where} holds another model: {'; '.join(problems)}")


def _with_near(names: Sequence[str], others: Sequence[str]) -> str:
    """Return the first few names, and one of the others that is near to the first."""
    near = near_words(names[0], others)[:1]
    return some(names) + (f" (did you mean {near[0]}?)" if near else "")
