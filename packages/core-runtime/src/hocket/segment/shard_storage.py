"""The memory of a sharded model's trainable parameters: each shard stays where FSDP or DTensor keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hocket.errors import ReplacedError
from hocket.segment.partition import ParameterSpan
from hocket.segment.shards import Shard, address_of, fsdp_modules, is_sharded, local, whole_of
from hocket.segment.storage import Bound, ParameterStorage, Pieces
from hocket.transport.peer import Peer


class ShardStorage(ParameterStorage):
    """The memory of the shards on this rank: a flat piece for each parameter, in its own place.

    FSDP gathers from memory of its own, which holds each shard padded: a buffer in its place would not be read. So
    nothing is moved. Torch itself moves uneven shards, in the first forward and in `load_state_dict`: `check` looks
    for them.
    """

    def __init__(self, model: nn.Module, peer: Peer) -> None:
        self._fsdp = fsdp_modules(model)
        self.forget_gathered()
        super().__init__(model, peer)

    def forget_gathered(self) -> None:
        for module in self._fsdp:
            module.reshard()

    def _held_here(self, parameter: nn.Parameter) -> nn.Parameter:
        return Shard.of(parameter) if is_sharded(parameter) else parameter

    def _place(self, peer: Peer) -> None:
        for span in self.spans:
            parameter = self.parameters[span.name]
            flat = _flat(parameter, span.numel)
            self._flats.append(([span], flat))
            self._bound.append(Bound(span.name, parameter, parameter.detach(), parameter.data_ptr()))
        self._pieces = {spans[0].name: flat for spans, flat in self._flats}
        self._wholes = [whole_of(bound.parameter) for bound in self._bound]

    def pieces_of(self, spans: Sequence[ParameterSpan]) -> Pieces:
        return [(slice(span.start, span.stop), self._pieces[span.name]) for span in spans]

    def is_bound(self) -> bool:
        return list(map(address_of, self._wholes)) == self._addresses

    def check(self, *, take_values: bool) -> None:
        if take_values:
            self.forget_gathered()
        if take_values or not self._fsdp:  # within a backward its modules hold gathered parameters
            super().check(take_values=take_values)

    def take_values(self) -> None:
        """Look up again where parameters lie."""
        if self.is_bound():
            return
        self._check_memory()
        for bound, whole, (_, flat) in zip(self._bound, self._wholes, self._flats, strict=True):
            # The same tensors over other memory: whoever holds them finds it there.
            if isinstance(bound.parameter, Shard):
                bound.parameter.data = local(whole).detach()
            flat.data = _flat(bound.parameter, flat.numel())
            bound.view, bound.address = bound.parameter.detach(), address_of(whole)
        self._addresses = [bound.address for bound in self._bound]
        self.was_set = False

    def release(self) -> None:
        pass  # each parameter has its own memory

    @contextmanager
    def without_set_values(self, merge: Callable[[], None], *, shown: bool = True) -> Iterator[None]:
        self.forget_gathered()
        self.take_values()
        yield

    def _check_memory(self) -> None:
        for bound, whole in zip(self._bound, self._wholes, strict=True):
            now = local(whole)
            then = bound.view
            if (now.dtype, now.shape, now.device) != (then.dtype, then.shape, then.device):
                raise ReplacedError(
                    f"this rank's shard of parameter {bound.name} was {then.dtype} {tuple(then.shape)} on "
                    f"{then.device} when the session was attached and is {now.dtype} {tuple(now.shape)} on "
                    f"{now.device} now (.to()?): convert the model before attach"
                )


def _flat(part: Tensor, numel: int) -> Tensor:
    """Return dense memory as a flat tensor, whatever the order of its axes."""
    return part.detach().as_strided((numel,), (1,))
