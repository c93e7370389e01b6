"""The optimizers of one model as one: their groups, their state, and the moment when all of them have stepped.

A step is over when each of them has stepped, or was skipped by a GradScaler; an optimizer that steps a second time ends
the step before. Optimizers within an attached one (SAM's `base_optimizer`) count as that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from hocket.errors import AttachError, ReplacedError, SessionError
from hocket.segment.shards import part_of, whole_of
from hocket.session.step.grad_scaler import watch_skips
from hocket.session.step.loaded_state import in_shards, load_keeping_dtypes, own_state
from hocket.session.torch_internals import current_backward, notices_steps, steps_under_way

Closure = Callable[[], Any]


class Stepped(Protocol):
    """A listener to optimizers' steps."""

    def before_step(self, optimizer: Optimizer, closure: Closure | None) -> Closure | None:
        """Prepare for the step of one optimizer; return the closure that it gets."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Note that one optimizer has stepped."""

    def skipped(self, optimizer: Optimizer) -> None:
        """Note that a GradScaler skipped the step of one optimizer."""

    def holds(self, parameter: Any) -> bool:
        """Return whether a parameter is one of the session's."""

    def called_by_ddp(self, ranks: int) -> None:
        """Note that DistributedDataParallel over `ranks` ranks is about to call the model.

        Raises:
            SessionError: both would average.
        """


class Optimizers:
    """One or more torch optimizers over the parameters of one model.

    Attributes:
        given: the attached optimizers, in order; in place of a wrapper (Lookahead, Accelerate's) the one that it holds.
        called: the wrapper that the user calls in place of each of them.
        every: the attached ones, each followed by those within it.
        waiting: those of `given` that the step under way still waits for.
        summed_rates: the learning rates of all groups in all steps since replicas were made equal. Ranks with different
            sums have stepped by different rates, even if these are equal when compared.
    """

    def __init__(self, given: Sequence[Optimizer]) -> None:
        self.called = tuple(given)
        self.given = tuple(map(stepped_by, given))
        self._attached = {inner: own for own in self.given for inner in _with_inner(own)}
        self.every = tuple(self._attached)
        self.waiting = set(self.given)
        self.summed_rates = 0.0
        #: Whether the session saves them, and not the user.
        self.is_saving = False
        self._groups = self._sizes()
        self._session: Stepped | None = None
        self._unrelated: WeakSet[Optimizer] = WeakSet()
        self._handles: list[RemovableHandle] = []

    @property
    def partly_stepped(self) -> bool:
        """Tell whether some have stepped, or were skipped, and others have not."""
        return len(self.waiting) < len(self.given)

    def begin_step(self) -> None:
        """Begin to wait for a step of each again."""
        self.waiting = set(self.given)

    def hook(self, session: Stepped) -> None:
        """Notify `session` of all their steps."""
        self._session = session
        for optimizer in self.every:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))
        _watch_steps()
        _hooked.add(self)

    def unhook(self) -> None:
        """Take the hooks off."""
        _hooked.discard(self)
        for handle in self._handles:
            handle.remove()

    @property
    def kind(self) -> str:
        """Return the names of their classes."""
        return ", ".join(type(optimizer).__name__ for optimizer in self.given)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups of all, in order."""
        return [group for optimizer in self.given for group in optimizer.param_groups]

    @property
    def in_training_mode(self) -> str:
        """Return the class of an optimizer that is in training mode (schedule-free); empty if there is none."""
        modes = (each for each in self.every if hasattr(each, "eval") and hasattr(each, "train"))
        return next((type(each).__name__ for each in modes if _trains(each)), "")

    def _sizes(self) -> list[int]:
        return [len(group["params"]) for group in self.param_groups]

    def settings(self) -> dict[str, Any]:
        """Return each group's settings (lr, momentum, ...) as plain values."""
        return {
            f"group {number}": {key: _plain(value) for key, value in group.items() if key != "params"}
            for number, group in enumerate(self.param_groups)
        }

    def state_of(self, parameter: Tensor) -> dict[str, Any]:
        """Return the optimizer's state of `parameter`; the mapping is the optimizer's own."""
        state: dict[str, Any] = {}
        parameter = whole_of(parameter)
        for optimizer in self.given:
            if parameter in optimizer.state:
                state = optimizer.state[parameter]
                return state
        for optimizer in self.given:
            if any(parameter is held for group in optimizer.param_groups for held in group["params"]):
                state = optimizer.state[parameter]
                return state
        return state

    def step(self) -> None:
        """Step all, in order."""
        for optimizer in self.called:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self.called:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of one optimizer, or those of several by number, those within others too.

        Of DTensors it has this rank's parts. The state of wrappers is under `holders`, by their number.
        """
        self.is_saving = True
        try:
            states = [in_shards(optimizer) for optimizer in self.every]
        finally:
            self.is_saving = False
        held = states[0] if len(states) == 1 else {str(number): state for number, state in enumerate(states)}
        own = enumerate(map(own_state, self.called, self.given))
        holders = {str(number): state for number, state in own if state}
        return {"held": held, "holders": holders} if holders else held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a result of `state_dict`; tensors keep the dtypes that they were saved in."""
        sharing = list(_sharing_groups(self.given))
        # Torch gives each groups and a state of its own, and those who hold one, as schedulers do, know the former.
        holding = [(o, i, key) for o, i in zip(self.called, self.given, strict=True) for key in _shared(o, i)]
        if "holders" in state:
            for number, own in state["holders"].items():
                self.called[int(number)].load_state_dict(own)
            state = state["held"]
        if len(self.every) == 1:
            load_keeping_dtypes(self.every[0], state)
        else:
            for number, optimizer in enumerate(self.every):
                load_keeping_dtypes(optimizer, state[str(number)])
        for inner, outer in sharing:
            inner.param_groups = outer.param_groups
        for holder, inner, key in holding:
            setattr(holder, key, getattr(inner, key))

    def check(self) -> None:
        """Refuse groups and parameters that were added or removed after attach.

        Raises:
            ReplacedError: names the group.
        """
        now = self._sizes()
        if now == self._groups:
            return
        pairs = zip_longest(now, self._groups)
        number = next(number for number, (size, before) in enumerate(pairs) if size != before)
        raise ReplacedError(
            f"group {number} of the optimizer's parameters changed after attach (add_param_group?): parameters added "
            "later would be trained on this rank only. Close the session and attach again"
        )

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._session is None or self._num_under_way() != 1:
            return None
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        closure = self._session.before_step(self._attached[optimizer], given)
        if closure is given:
            return None
        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._session is not None and self._num_under_way() == 1:
            self._sum_rates(optimizer)
            self._session.after_step(self._attached[optimizer])

    def leave_out(self) -> None:
        """Note a step that this rank alone leaves out: its learning rates are not what differs."""
        for optimizer in self.given:
            self._sum_rates(optimizer)

    def _sum_rates(self, optimizer: Optimizer) -> None:
        rates = (group.get("lr") for group in optimizer.param_groups)
        # Not tensors, for which a device would have to be waited for.
        self.summed_rates += sum(rate for rate in rates if isinstance(rate, float))

    def _skipped(self, optimizer: Optimizer) -> None:
        # What the scaler was given may hold the one that was attached, as Lookahead and plain classes do.
        own = next((self._attached[each] for each in _with_inner(optimizer) if each in self._attached), None)
        if self._session is not None and own is not None:
            self._session.skipped(own)

    def _num_under_way(self) -> int:
        """Return the number of nested steps of this session under way (SAM, `super().step()`)."""
        return sum(optimizer in self._attached for optimizer in steps_under_way())

    def _holds(self, parameter: Any) -> bool:
        return self._session is not None and self._session.holds(parameter)

    def _refuse(self, optimizer: Optimizer) -> None:
        """Refuse the step of an optimizer that is not attached, if it has parameters of the session."""
        if optimizer in self._attached or optimizer in self._unrelated or self._num_under_way():
            return
        shared = [p for group in optimizer.param_groups for p in group["params"] if self._holds(p)]
        if not shared:
            self._unrelated.add(optimizer)
            return
        refuse_within_backward(optimizer)
        if any(parameter.grad is not None for parameter in shared):
            raise AttachError(
                f"an optimizer ({type(optimizer).__name__}) that is not attached steps {len(shared)} of the session's "
                "parameters: attach all of the model's optimizers, hocket.attach(model, [first, second], ...)"
            )


def stepped_by(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that torch's step hooks see: for a wrapper, the one within.

    Raises:
        AttachError: there is none.
    """
    if notices_steps(optimizer):
        return optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value is not optimizer:
            return stepped_by(value)
    raise AttachError(
        f"the optimizer ({type(optimizer).__name__}) was made without torch.optim.Optimizer.__init__, so Hocket "
        "cannot see its steps: call super().__init__(params, defaults) in its __init__, or attach the optimizer "
        "that it steps"
    )


#: Those of the sessions that are not closed.
_hooked: WeakSet[Optimizers] = WeakSet()


def is_attached(parameter: object) -> bool:
    """Return whether an open session holds a parameter."""
    return any(optimizers._holds(parameter) for optimizers in list(_hooked))


def sessions_with(parameters: Iterable[Tensor]) -> list[Stepped]:
    """Return the open sessions that hold one of the parameters or more."""
    hooked = [(each, each._session) for each in list(_hooked) if each._session is not None]
    held = list(parameters) if hooked else []
    return [session for each, session in hooked if any(map(each._holds, held))]


def refuse_within_backward(optimizer: Optimizer, where: str = "") -> None:
    """Refuse a step from a gradient's hook, before the gradients have been exchanged.

    Args:
        optimizer: the optimizer that is about to step.
        where: begins the message.

    Raises:
        SessionError: a backward is under way.
    """
    if current_backward() >= 0:
        raise SessionError(
            f"{where}{type(optimizer).__name__}.step() was called within backward() (by a gradient's hook, or "
            "_apply_optimizer_in_backward), before gradients are averaged, so replicas would drift apart. Remove "
            "the hooks, attach one optimizer over all parameters, and step it after backward()"
        )


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters of all groups, of sharded ones this rank's shards."""
    return (part_of(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _trains(optimizer: Optimizer) -> bool:
    return getattr(optimizer, "train_mode", False) or any(
        group.get("train_mode", False) for group in optimizer.param_groups
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    is_data = value is None or isinstance(value, bool | int | float | str | list | tuple | dict)
    return value if is_data else type(value).__qualname__  # what else it says may be an address


def _with_inner(optimizer: Optimizer) -> Iterator[Optimizer]:
    yield optimizer
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and value is not optimizer:
            yield from _with_inner(value)


def _sharing_groups(given: Sequence[Optimizer]) -> Iterator[tuple[Optimizer, Optimizer]]:
    """Yield optimizers within others that share their groups, with the attached one."""
    for outer in given:
        for inner in _with_inner(outer):
            if inner is not outer and _identities(inner) == _identities(outer):
                yield inner, outer


def _shared(holder: Optimizer, inner: Optimizer) -> list[str]:
    """Return the attributes, groups and state, that a wrapper shares with its inner optimizer."""
    own = vars(holder) if holder is not inner else {}
    return [key for key in ("param_groups", "state") if own.get(key) is getattr(inner, key)]


def _identities(optimizer: Optimizer) -> list[int]:
    return list(map(id, optimizer.param_groups))


@cache
def _watch_steps() -> None:
    """Watch every optimizer's steps, and those that a GradScaler skips."""
    register_optimizer_step_pre_hook(_refuse_foreign)
    watch_skips(_skipped)


def _skipped(optimizer: Optimizer) -> None:
    for optimizers in list(_hooked):
        optimizers._skipped(optimizer)


def _refuse_foreign(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for optimizers in list(_hooked):
        optimizers._refuse(optimizer)
