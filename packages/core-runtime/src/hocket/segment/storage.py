"""The flat buffers that a model's trainable parameters are views of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hocket.errors import ReplacedError
from hocket.segment.partition import Span, named_spans, partition
from hocket.segment.segment import allocate, view_of
from hocket.strategy.segmentation import Model
from hocket.transport.peer import Peer

__all__ = ["ParameterStorage"]


@dataclass
class _Bound:
    """A parameter, its module's dictionary that must keep holding it, and its view."""

    name: str
    parameter: nn.Parameter
    owner: dict[str, nn.Parameter | None]
    key: str
    view: Tensor
    address: int


class ParameterStorage:
    """One flat buffer for each dtype and device, in the model's order.

    Construction moves the values of the trainable parameters into the buffers and makes the parameters views of
    them, with their strides.

    Args:
        model: whose trainable parameters are taken.
        peer: whose transport gives the memory.
    """

    def __init__(self, model: nn.Module, peer: Peer) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self.spans = named_spans(self.parameters.items())
        self._flats: list[tuple[list[Span], Tensor]] = []
        self._places: dict[str, tuple[Tensor, int]] = {}
        self._bound: list[_Bound] = []
        owners = _owners(model)
        self._children = [
            (f"{path}.{key}".lstrip("."), module._modules, key, child)
            for path, module in model.named_modules()
            for key, child in module._modules.items()
        ]
        for spans in partition(self.spans, Model()):
            flat = allocate(peer, spans[-1].start + spans[-1].padded_numel, spans[0].dtype, spans[0].device)
            self._flats.append((spans, flat))
            for span in spans:
                self._places[span.name] = (flat, span.start)
                parameter = self.parameters[span.name]
                view = view_of(flat, span)
                with torch.no_grad():
                    view.copy_(parameter)
                parameter.data = view
                owner, key = owners[id(parameter)]
                self._bound.append(_Bound(span.name, parameter, owner, key, view, view.data_ptr()))

    @property
    def flats(self) -> list[Tensor]:
        """The buffers, each flat."""
        return [flat for _, flat in self._flats]

    def slice_for(self, spans: Sequence[Span]) -> Tensor:
        """Return the flat part of the storage that holds the parameters of one segment."""
        flat, start = self._places[spans[0].name]
        return flat[start : start + spans[-1].start + spans[-1].padded_numel]

    def check(self) -> None:
        """Notice what was replaced under the session; take new values over where shape and dtype still fit.

        Raises:
            ReplacedError: a module or a parameter is another object, or a parameter has another dtype, shape or
                device, or was frozen when the session was attached.
        """
        for path, children, key, child in self._children:
            if children.get(key) is not child:
                raise ReplacedError(
                    f"module {path} was replaced by another object after attach: its parameters are not carried. "
                    "Close the session, and attach again with an optimizer over the new ones"
                )
        for bound in self._bound:
            replaced = bound.owner.get(bound.key) is not bound.parameter
            if replaced:
                raise ReplacedError(
                    f"parameter {bound.name} was replaced by another object after attach "
                    "(load_state_dict(assign=True)?): the optimizer still holds the old one. Load with assign=False, "
                    "or before the optimizer is built"
                )
            if bound.parameter.data_ptr() != bound.address:
                self._take_over(bound)
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ReplacedError(
                    f"parameter {name} was frozen when the session was attached, and requires a gradient now: its "
                    "gradients would stay on this rank. Close the session and attach again"
                )

    def _take_over(self, bound: _Bound) -> None:
        parameter, view = bound.parameter, bound.view
        if parameter.dtype != view.dtype or parameter.shape != view.shape or parameter.device != view.device:
            raise ReplacedError(
                f"parameter {bound.name} was {view.dtype} {tuple(view.shape)} on {view.device} when the session was "
                f"attached and is {parameter.dtype} {tuple(parameter.shape)} on {parameter.device} now (.to()?): "
                "convert the model before attach"
            )
        with torch.no_grad():
            view.copy_(parameter)
        parameter.data = view


def _owners(model: nn.Module) -> dict[int, tuple[dict[str, nn.Parameter | None], str]]:
    owners: dict[int, tuple[dict[str, nn.Parameter | None], str]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), (module._parameters, key))
    return owners
