"""Overlap forward: each segment is merged just before the forward pass first reads one of its parameters.

A module's forward pre-hook merges the segments of the parameters that it owns. Some parameters are read outside of
the module that owns them (`MultiheadAttention.out_proj.weight`, an embedding's weight tied to the output layer):
the first forward is watched to find these, and from then on their segments are merged before the model's own
forward begins. Segments that the forward did not reach are merged when it ends, so that a loss may read all parameters.
Where a module is not called in a later forward, and its parameters get a gradient all the same, they were read that
way: from then on they are among these. Where parts are called and not the model (`model.encode(x)`), or are compiled,
the begin of a forward is unknown: from then on all segments are sent and merged at the step's end, as with overlap
none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from hocket.errors import SessionError, some
from hocket.progress import ProgressEngine
from hocket.session.exchange.parameters import ParameterMix
from hocket.session.torch_internals import pre_hooks, replace_method

_log = logging.getLogger("hocket")


class ForwardMerge:
    """The hooks that merge one exchange before parameters are read.

    Args:
        model: the attached model; it has to be called for its forward to be noticed, as torch's own hooks need it.
        exchange: an exchange with overlap forward.
    """

    def __init__(self, model: nn.Module, exchange: ParameterMix) -> None:
        self._exchange = exchange
        self._parameters = {
            span.name: model.get_parameter(span.name)
            for segment in exchange.opened.segments
            for span in segment.spans
        }
        self._unreached: set[int] = set()
        self._segment_of = {
            span.name: segment.index for segment in exchange.opened.segments for span in segment.spans
        }
        self._early: set[int] | None = None
        self._inside = False
        self._probe: _Probe | None = None
        self._handles: list[RemovableHandle] = []
        owned: dict[str, list[str]] = {}
        for name in self._segment_of:
            owned.setdefault(name.rpartition(".")[0], []).append(name)
        for path, names in owned.items():
            if path:
                self._hook_module(
                    model.get_submodule(path), sorted({self._segment_of[name] for name in names})
                )
        self._model = model
        self._handles += [
            model.register_forward_pre_hook(ModuleHook(model, self._before_forward), prepend=True),
            model.register_forward_hook(ModuleHook(model, self._after_forward), always_call=True),
            model.register_state_dict_pre_hook(ModuleHook(model, self._settle)),
        ]
        _watch_compiling()

    def _merge_at_steps_end(self, why: str) -> None:
        """Send and merge at the step's end from now on."""
        if not self._exchange.at_steps_end:
            self._exchange.at_steps_end = True
            opened = self._exchange.opened
            if opened.peer.rank == 0:
                _log.warning(
                    "%s: from now on `overlap: forward` has no effect, because %s. Remove this cause, or set `overlap: "
                    "none`",
                    opened.exchange.name,
                    why,
                )

    def compiled(self, name: str) -> None:
        """Note that a part of the model is compiled, with the hooks that it has then; on all ranks."""
        with torch.no_grad():
            self._exchange.merge_all()
        self._merge_at_steps_end(f"{name} is compiled, and compiled code does not run the session's hooks")
        self.close()

    def look_before_step(self) -> None:
        """Find parameters that were read before they were merged, by their gradients; before each step."""
        if self._exchange.due:
            self._merge_at_steps_end(
                "a step came without a forward of the model since the last step (is it called as model(x)?)"
            )
        if not self._unreached:
            return
        unreached, self._unreached = self._unreached, set()
        gradients = ((name, self._parameters[name].grad) for name in self._segment_of)
        names = [
            name
            for name, given in gradients
            if given is not None and self._segment_of[name] in unreached and bool(given.any())
        ]
        if names and self._early is not None:
            self._early |= {self._segment_of[name] for name in names}
            _log.warning(
                "%s: the last forward read %s without calling its module, so it missed what other ranks had sent. "
                "From now on, what other ranks sent is merged before each forward. To overlap this with the forward "
                "again, call the module instead of reading its parameter",
                self._exchange.opened.exchange.name,
                some(names),
            )

    def _hook_module(self, module: nn.Module, segments: list[int]) -> None:
        def read(*_: object) -> None:
            if not self._inside:
                if torch.is_grad_enabled() and (self._exchange.under_way or self._early is None):
                    self._merge_at_steps_end(
                        f"{type(module).__name__} is called outside of model(x), but only a call of "
                        "model(x) tells the session when to merge received values"
                    )
                self._begin()
                self._settle()
            else:
                with torch.no_grad():
                    for index in segments:
                        self._exchange.merge(index)

        hook = ModuleHook(module, read, self)
        self._handles.append(module.register_forward_pre_hook(hook, prepend=True))

    def _before_forward(self, inputs: object) -> None:
        self._inside = True
        self._begin()
        if self._early is None and not self._exchange.due:
            self._settle()
            self._probe = _Probe(self._model, set(self._segment_of))
            self._probe.__enter__()  # type: ignore[no-untyped-call]
            return
        with torch.no_grad():
            for index in self._early or ():
                self._exchange.merge(index)

    def _after_forward(self, inputs: object, output: object) -> None:
        succeeded = output is not None
        self._inside = False
        if self._probe is not None:
            self._probe.__exit__(None, None, None)
            if succeeded:
                own = {name for name in self._segment_of if "." not in name}
                self._early = {self._segment_of[name] for name in self._probe.read_outside | own}
            self._probe = None
        if succeeded and self._early is not None and torch.is_grad_enabled():
            self._unreached |= self._exchange.started()
        if succeeded:
            # After a failure the next forward merges: to wait for ranks here would hide what went wrong.
            self._settle()

    def _begin(self) -> None:
        # A forward without gradients may be one rank's alone (it evaluates, while the others wait for it).
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._exchange.begin()

    def _settle(self, *_: object) -> None:
        if not self._exchange.due:
            with torch.no_grad():
                self._exchange.merge_all()

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class _Probe(TorchFunctionMode):
    """A watch over one forward for parameters that are read while no module that owns them runs."""

    def __init__(self, model: nn.Module, names: set[str]) -> None:
        super().__init__()
        self.read_outside: set[str] = set()
        self._names = {id(p): name for name, p in model.named_parameters() if name in names}
        self._running: list[nn.Module] = []
        self._handles = [
            handle
            for module in model.modules()
            for handle in (
                module.register_forward_pre_hook(lambda module, _: self._running.append(module)),
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            )
        ]

    def _leave(self) -> None:
        if self._running:
            self._running.pop()

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        for leaf in tree_leaves((args, kwargs)):
            name = self._names.get(id(leaf))
            if name is not None and not any(p is leaf for m in self._running for p in m._parameters.values()):
                self.read_outside.add(name)
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(*error)  # type: ignore[no-untyped-call]


class ModuleHook:
    """A hook of `module` that calls `act`, except on copies of the module (EMA)."""

    def __init__(
        self, module: nn.Module, act: Callable[..., None], merges: ForwardMerge | None = None
    ) -> None:
        self._module = module
        self.merges = merges
        self._act = act

    def __call__(self, given: nn.Module, *args: object) -> None:
        if given is self._module:
            self._act(*args)

    def __deepcopy__(self, memo: object) -> ModuleHook:
        # A deep copy of a model copies its hooks, and must not copy the session with them.
        return self

    def __reduce__(self) -> NoReturn:
        raise SessionError(
            "a model in a session with overlap cannot be pickled (torch.save(model)): save model.state_dict(), or "
            "close the session first"
        )


@cache
def _watch_compiling() -> None:
    """Watch for parts of a model that are compiled in place (`part.compile()`) from now on."""

    def noting(compile_part: Callable[..., None]) -> Callable[..., None]:
        def compile_noted(self: nn.Module, *args: object, **kwargs: object) -> None:
            hooks = [hook for module in self.modules() for hook in pre_hooks(module)]
            for merges in {hook.merges for hook in hooks if isinstance(hook, ModuleHook) and hook.merges}:
                merges.compiled(type(self).__name__)
            compile_part(self, *args, **kwargs)

        return compile_noted

    replace_method(nn.Module, "compile", noting)


class ProgressHooks:
    """The hooks that advance exchanges whenever a layer begins its forward, or has its gradient.

    Without it a message that needs both ends, as MPI's large ones do, would stand still while the model computes.

    Source: GossipGraD (Daily et al. 2018), sec. 5.1, which calls MPI_Testall between layers.

    Args:
        model: the attached model.
        progress: advances exchanges under way.
        backward: whether in backward, too. Where gradients are exchanged their own hooks do so.
    """

    def __init__(self, model: nn.Module, progress: ProgressEngine, *, backward: bool) -> None:
        def advance(*_: object) -> None:
            progress.advance()

        self._handles: list[RemovableHandle] = []
        for module in model.modules():
            own = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if own:
                self._handles.append(module.register_forward_pre_hook(ModuleHook(module, advance)))
                if backward:
                    self._handles.append(own[0].register_post_accumulate_grad_hook(advance))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
