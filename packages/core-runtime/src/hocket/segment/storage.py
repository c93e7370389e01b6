"""The flat buffers that a model's trainable parameters are views of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from hocket.errors import ReplacedError
from hocket.plain import TreeView
from hocket.segment.partition import Model, ParameterSpan, named_spans, partition
from hocket.segment.segment import allocate, own_storage_of
from hocket.transport.peer import Peer

T = TypeVar("T")

#: Places in a segment, in order, and the flat parts of the storage that hold the parameters of each.
Pieces = list[tuple[slice, Tensor]]


@dataclass
class Bound:
    """A parameter with its view of a buffer."""

    name: str
    parameter: nn.Parameter
    view: Tensor
    address: int


class ParameterStorage:
    """The memory of a model's trainable parameters: a flat buffer for each dtype and device, in order.

    Construction moves the values of the trainable parameters into the buffers, which the parameters lie in from then
    on: each with its strides, and with a storage of its own, so that files hold it as any other tensor.

    Args:
        model: the model of the parameters.
        peer: the peer whose transport gives the memory.
    """

    def __init__(self, model: nn.Module, peer: Peer) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = {name: self._held_here(p) for name, p in trained}
        shards = {name: p.numel() for name, p in trained if self.parameters[name] is not p}
        self.spans = named_spans(self.parameters.items(), shards)
        self._flats: list[tuple[list[ParameterSpan], Tensor]] = []
        self._offsets: dict[str, tuple[Tensor, int]] = {}
        self._bound: list[Bound] = []
        self._owners = {path: module._parameters for path, module in model.named_modules()}
        self._children = {path: module._modules for path, module in model.named_modules()}
        self._place(peer)
        self._addresses = [bound.address for bound in self._bound]
        self._bound_parameters = [bound.parameter for bound in self._bound]
        #: Whether the last look has found parameters that were set, and were left so.
        self.was_set = False
        self._remember()

    def _held_here(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what this rank holds of a parameter, as a plain parameter."""
        return parameter

    def _place(self, peer: Peer) -> None:
        """Give all parameters their memory."""
        for spans in partition(self.spans, Model()):
            flat = allocate(peer, spans[-1].start + spans[-1].padded_numel, spans[0].dtype, spans[0].device)
            self._flats.append((spans, flat))
            for span in spans:
                self._offsets[span.name] = (flat, span.start)
                parameter = self.parameters[span.name]
                view = own_storage_of(flat, span)
                with torch.no_grad():
                    view.copy_(parameter)
                parameter.data = view
                self._bound.append(Bound(span.name, parameter, view, view.data_ptr()))

    def forget_gathered(self) -> None:
        """Drop copies of parameters that a forward has gathered, before the parameters' memory is written."""

    @property
    def flats(self) -> list[Tensor]:
        """Return the buffers, each flat."""
        return [flat for _, flat in self._flats]

    def pieces_of(self, spans: Sequence[ParameterSpan]) -> Pieces:
        """Return the places of a segment's parameters in the storage: one piece if they lie side by side."""
        pieces: list[tuple[Tensor, int, slice]] = []
        for span in spans:
            flat, start = self._offsets[span.name]
            if pieces and pieces[-1][0] is flat:
                _, first, place = pieces[-1]
                if first + place.stop - place.start == start and place.stop == span.start:
                    pieces[-1] = flat, first, slice(place.start, span.start + span.padded_numel)
                    continue
            pieces.append((flat, start, slice(span.start, span.start + span.padded_numel)))
        return [(place, flat[start : start + place.stop - place.start]) for flat, start, place in pieces]

    def sampled(self, most: int) -> list[tuple[Tensor, Tensor]]:
        """Return each flat buffer with the indices of at most so many elements of each parameter, spread over it."""
        return [
            (
                flat,
                torch.cat(
                    [s.start + torch.linspace(0, s.numel - 1, min(s.numel, most)).long() for s in spans]
                ).to(flat.device),
            )
            for spans, flat in self._flats
        ]

    def is_bound(self) -> bool:
        """Return whether all parameters are still in the storage."""
        return list(map(Tensor.data_ptr, self._bound_parameters)) == self._addresses

    def check(self, *, take_values: bool) -> None:
        """Refuse modules and parameters that were replaced since attach.

        Args:
            take_values: whether to call `take_values`, too.

        Raises:
            ReplacedError: a module or a parameter is another object, was added, or has another dtype, shape or device;
                a parameter was frozen when the session was attached; or the parameters' memory was moved.
        """
        # A few microseconds in all, as it is looked at in every step: the loops below run where something differs.
        if self.is_bound() and self._holds_noted() and not any(map(_REQUIRES_GRAD, self._frozen.values())):
            return
        self._check_modules()
        self._check_memory()
        self.was_set = not self.is_bound()
        if take_values:
            self.take_values()
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ReplacedError(
                    f"parameter {name} was frozen at attach, but requires a gradient now. Its gradient "
                    "would stay on this rank: close the session and attach again"
                )
        self._remember()

    def take_values(self) -> None:
        """Take over values that parameters were set to (`p.data = ...`); not while a step may reset them (SAM).

        Raises:
            ReplacedError: a parameter has another dtype, shape or device, or the parameters' memory was moved.
        """
        if self.is_bound():
            return
        self._check_memory()
        self.was_set = False
        for bound in self._bound:
            if bound.parameter.data_ptr() != bound.address:
                with torch.no_grad():
                    bound.view.copy_(bound.parameter)
                bound.parameter.data = bound.view

    def release(self) -> None:
        """Give each parameter that is still in the storage memory of its own again."""
        for bound in self._bound:
            if bound.parameter.data_ptr() == bound.address:
                bound.parameter.data = bound.view.clone(memory_format=torch.preserve_format)

    @contextmanager
    def without_set_values(self, merge: Callable[[], None], *, shown: bool = True) -> Iterator[None]:
        """Return a context for reading parameters, which keeps values that they were set to (`p.data = ...`).

        A program that has set them may hold references to the values before, to reset them: these stay as they are,
        apart from merges.

        Args:
            merge: merges into the values from before, as the next forward would.
            shown: whether parameters hold the values that they were set to meanwhile; else those from before.

        Raises:
            ReplacedError: a parameter has another dtype, shape or device, or the parameters' memory was moved.
        """
        if self.is_bound():
            yield
            return
        self._check_memory()
        were_set = [(b, b.parameter.data) for b in self._bound if b.parameter.data_ptr() != b.address]
        for bound, _ in were_set:
            bound.parameter.data = bound.view
        merge()
        before = [flat.clone() for flat in self.flats] if shown else []
        with torch.no_grad():
            for bound, value in were_set if shown else ():
                bound.view.copy_(value)
        gives_back = True
        try:
            yield
        except GeneratorExit:
            gives_back = False  # a consensus without `with`, which is for good
            raise
        finally:
            if gives_back:
                with torch.no_grad():
                    for flat, value in zip(self.flats, before, strict=False):
                        flat.copy_(value)
                for bound, value in were_set:
                    bound.parameter.data = value

    def _remember(self) -> None:
        """Note the modules' current children and parameters as the expected ones."""
        self._children_then = _entries(self._children)
        self._parameters_then = _entries(self._owners)
        self._frozen = {
            name: p
            for name, p in self._parameters_then.items()
            if p is not None and not p.requires_grad and name not in self.parameters
        }
        self._held: list[TreeView] = [*self._children.values(), *self._owners.values()]
        self._noted = list(map(dict, self._held))
        named = [(of, key, p) for of in self._owners.values() for key, p in of.items()]
        self._single = [(of, key, p) for of, key, p in named if p is not None and p.numel() == 1]

    def _holds_noted(self) -> bool:
        """Return whether the modules hold the children and parameters that were noted, and no others."""
        try:
            alike = self._held == self._noted  # at once, where all are the same objects
        except RuntimeError:  # of two tensors of several elements
            return False
        return alike and all(of[key] is p for of, key, p in self._single)

    def _check_modules(self) -> None:
        """Refuse modules and parameters that were replaced, added or removed."""
        for name, child, now in _differing(self._children_then, _entries(self._children)):
            raise ReplacedError(
                f"module {name} was {_what_became(child, now)} after attach, so the session does not exchange its "
                "parameters. Close the session, and attach again with an optimizer over the new parameters"
            )
        for name, parameter, now in _differing(self._parameters_then, _entries(self._owners)):
            if name not in self.parameters and (now is None or not now.requires_grad):
                continue  # frozen, so that nobody sends it
            if parameter is not None and now is not None:
                raise ReplacedError(
                    f"parameter {name} was replaced by another object after attach "
                    "(load_state_dict(assign=True)?): the optimizer still holds the old one. Load with assign=False, "
                    "or before the optimizer is built"
                )
            raise ReplacedError(
                f"parameter {name} was {_what_became(parameter, now)} after attach, but the session still holds the "
                "earlier parameters. Close the session and attach again"
            )

    def _check_memory(self) -> None:
        """Refuse parameters that were moved together, or that no longer fit their places."""
        if any(bound.view.data_ptr() != bound.address for bound in self._bound):
            raise ReplacedError(
                "the parameters' memory was moved after attach (model.share_memory(), or parameters handed to another "
                "process by torch.multiprocessing): hand a copy to that process ({name: p.detach().clone() ...})"
            )
        for name, parameter, view in ((bound.name, bound.parameter, bound.view) for bound in self._bound):
            if (parameter.dtype, parameter.shape, parameter.device) != (view.dtype, view.shape, view.device):
                raise ReplacedError(
                    f"parameter {name} was {view.dtype} {tuple(view.shape)} on {view.device} when the session was "
                    f"attached and is {parameter.dtype} {tuple(parameter.shape)} on {parameter.device} now (.to()?): "
                    "convert the model before attach"
                )


#: Of a tensor; in C.
_REQUIRES_GRAD = attrgetter("requires_grad")


def _entries(held: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    return {f"{path}.{key}".lstrip("."): value for path, of in held.items() for key, value in of.items()}


def _differing(then: Mapping[str, T], now: Mapping[str, T]) -> Iterable[tuple[str, T | None, T | None]]:
    for name in {**then, **now}:
        if then.get(name) is not now.get(name):
            yield name, then.get(name), now.get(name)


def _what_became(then: object, now: object) -> str:
    if then is None:
        return "added"
    return "taken away" if now is None else "replaced by another object"
