"""Refusals of models and optimizers that a session cannot carry, by name, before any change."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor, nn

from hocket.compressor.optimizer_terms import optimizer_terms
from hocket.config.component import component_name
from hocket.errors import AttachError
from hocket.segment.shards import fsdp_modules, is_sharded, local
from hocket.session.step.optimizers import is_attached, stepped_by
from hocket.session.torch_internals import is_compiled, is_sharded_by_fsdp
from hocket.strategy.exchange import Exchange, ProgressMode
from hocket.strategy.rules.refusal import flow
from hocket.strategy.strategy import Strategy
from hocket.transport.device.groups import BACKENDS
from hocket.transport.peer import Peer


def check(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse models and optimizers that cannot be carried.

    Raises:
        AttachError: names the parameter, module or wrapper, and what to do.
    """
    if not isinstance(model, nn.Module):
        raise AttachError(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    if not optimizers:
        raise AttachError("attach takes one torch.optim.Optimizer or more, not an empty list")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise AttachError(f"attach takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
        if _is_a(optimizer, "torch.distributed.optim", "ZeroRedundancyOptimizer"):
            raise AttachError(
                "ZeroRedundancyOptimizer divides its step among the ranks and sends the parameters itself: attach a "
                "plain optimizer of its optimizer_class, over all of the model's parameters"
            )
        stepped_by(optimizer)
    _check_modules(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, local(parameter))
    for name, buffer in buffers.items():
        _check_buffer(name, buffer)
    _check_memory({**parameters, **buffers})
    _check_optimizers(optimizers, {id(parameter): name for name, parameter in parameters.items()})
    for name, parameter in parameters.items():
        if is_attached(parameter):
            raise AttachError(
                f"parameter {name} is in an earlier session that is still open (a notebook cell run again?): call "
                "session.close() there first, or leave its `with` block"
            )


def check_devices(model: nn.Module, strategy: Strategy, peer: Peer) -> None:
    """Refuse virtual ranks that would wait for each other on autograd's one thread for a device.

    Raises:
        AttachError: the model is on a device, and gradients are exchanged, now or in a later phase.
    """
    device = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
    if (
        device is not None
        and peer.threads.shares_process
        and any(each.gradients for each in strategy.in_turn)
    ):
        raise AttachError(
            f"the model is on {device}, and {strategy.name or 'the strategy'} exchanges gradients: virtual ranks "
            "share autograd's single thread for that device, so they would deadlock. Train on the CPU, use a "
            "strategy that exchanges parameters only, or use transport mpi"
        )


def check_gradients(model: nn.Module, strategy: Strategy) -> None:
    """Refuse exchanged gradients that are to have another dtype than their parameter.

    Raises:
        AttachError: names the parameter.
    """
    if not any(each.gradients for each in strategy.in_turn):
        return
    for name, parameter in model.named_parameters():
        wanted = getattr(parameter, "grad_dtype", None)
        if parameter.requires_grad and wanted not in (None, parameter.dtype):
            raise AttachError(
                f"parameter {name} is {parameter.dtype}, but its grad_dtype is {wanted}, and exchanged gradients have "
                f"the parameter's dtype: do not set grad_dtype, or keep the parameter in {wanted} and use "
                "torch.autocast"
            )


def check_lanes(lanes: str, model: nn.Module, strategy: Strategy, *, whole: bool) -> None:
    """Refuse device lanes for models that are elsewhere, and for messages of differing lengths.

    Args:
        lanes: `host`, or the backend's name.
        whole: whether every rank holds a whole model.

    Raises:
        AttachError: the lanes cannot carry this; names the alternative.
    """
    if lanes == "host":
        return
    if not whole:
        raise AttachError(
            f"lanes={lanes!r} needs whole models, but this engine's ranks hold parts: use lanes='host'"
        )
    carried = next(kind for kind, backend in BACKENDS.items() if backend.name == lanes)
    devices = {p.device for p in model.parameters() if p.requires_grad}
    if len(devices) > 1 or any(device.type != carried for device in devices):
        raise AttachError(
            f"lanes={lanes!r} needs all parameters on one {carried} device, but this model has them on "
            f"{' and '.join(sorted(map(str, devices)))}: use lanes='host', or move the model"
        )
    for exchange in (exchange for each in strategy.in_turn for exchange in each.exchanges):
        reason = None
        if exchange.compressor is not None:
            reason = f"compressor {component_name(exchange.compressor)} packs messages in host memory"
        elif not exchange.collective.traits.on_devices:
            reason = f"{component_name(exchange.collective)} packs its own messages in host memory"
        elif exchange.progress is ProgressMode.THREAD:
            reason = "`progress: thread` may begin messages in a different order on each rank"
        if reason is not None:
            raise AttachError(
                f"{exchange.name}: lanes={lanes!r} needs uncompressed values, sent in the same order on all ranks, "
                f"but {reason}: use lanes='host'"
            )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer cannot step without a closure, as LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def refuse_closure(optimizer: torch.optim.Optimizer, strategy: Strategy, *, sharded: bool = False) -> None:
    """Refuse a step with a closure where it would compute with other values than the model's.

    Args:
        sharded: whether each rank holds a shard of the model.

    Raises:
        AttachError: parameters are exchanged by push-sum, now or in a later phase; or the model is sharded.
    """
    if sharded:
        raise AttachError(
            f"{type(optimizer).__name__} steps with a closure and computes norms over its parameters, which are only "
            "shards here: use an optimizer that steps without a closure"
        )
    exchanges = (exchange for each in strategy.in_turn for exchange in each.parameters)
    for exchange in (exchange for exchange in exchanges if exchange.carries_weight):
        raise AttachError(
            f"{strategy.name or 'the strategy'}: {exchange.name} is push-sum, and {type(optimizer).__name__} steps "
            "with a closure, which would see weighted parameters. Use an optimizer that steps without a closure, or "
            "topology ring, exponential or random_matching"
        )


_NOT_FSDP1 = (
    ", whose flat parameters no session can exchange: shard with torch.distributed.fsdp.fully_shard (FSDP2), over the "
    "ranks of one island"
)


def _check_modules(model: nn.Module) -> None:
    sharded = bool(fsdp_modules(model))
    for name, module in model.named_modules():
        what = f"module {name!r}" if name else "the model"
        if _is_a(module, "torch.nn.parallel.distributed", "DistributedDataParallel"):
            raise AttachError(
                f"{what} is wrapped in DistributedDataParallel, which would average the gradients a second time: "
                "leave it out, attach the plain model, and call the plain model (not ddp(x))"
            )
        if _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            raise AttachError(f"{what} is sharded by FullyShardedDataParallel{_NOT_FSDP1}")
        compiled = is_compiled(module) and not (
            sharded and name
        )  # FSDP's hooks are outside of compiled layers
        if compiled or _is_a(module, "torch._dynamo.eval_frame", "OptimizedModule"):
            raise AttachError(
                f"{what} is already compiled, and compiled code ignores hooks that are added later: attach the plain "
                "model first, then torch.compile it"
            )
        if isinstance(module, nn.DataParallel) and len(getattr(module, "device_ids", ())) > 1:
            raise AttachError(
                f"{what} is wrapped in DataParallel over {len(module.device_ids)} devices, whose copies run the "
                "session's hooks in threads: start a rank for each device, and attach the plain model"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise AttachError(
                f"{what} is TorchScript, which does not run the session's Python hooks: attach the plain model, and "
                "script it after training"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise AttachError(
                f"{what} is an embedding with sparse gradients, which do not fit into flat buffers: build it with "
                "sparse=False"
            )


def _check_parameter(name: str, parameter: nn.Parameter, part: Tensor) -> None:
    """Refuse a parameter, of which this rank holds `part`, that cannot be carried."""
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise AttachError(f"parameter {name} is lazy and has no shape yet: run one forward before attach")
    if is_sharded_by_fsdp(parameter):  # attached is the module within
        raise AttachError(f"parameter {name} is sharded by FullyShardedDataParallel{_NOT_FSDP1}")
    if part.is_meta:
        raise AttachError(
            f"parameter {name} is on the meta device and holds no values: materialise it (to_empty)"
        )
    if parameter.is_nested or parameter.layout != torch.strided:
        raise AttachError(
            f"parameter {name} has layout {_layout(parameter)}: only strided parameters can be exchanged"
        )
    if not parameter.requires_grad:
        return
    if not parameter.is_floating_point() or parameter.dtype.itemsize < torch.float16.itemsize:
        raise AttachError(
            f"parameter {name} is {parameter.dtype}: only float16, bfloat16, float32 and float64 can be exchanged"
            + (" (keep a complex one as two real ones, torch.view_as_real)" if parameter.is_complex() else "")
        )
    if is_sharded(parameter) and type(part) not in (Tensor, nn.Parameter):
        raise AttachError(
            f"this rank's shard of parameter {name} is a {type(part).__name__}, which is not plain memory and cannot "
            "be sent: shard parameters that are plain tensors"
        )
    if not _is_dense(part):
        raise AttachError(
            f"parameter {name} has overlapping or scattered elements (expanded or sliced?): make it "
            "contiguous before attach"
        )


def _check_buffer(name: str, buffer: Tensor) -> None:
    if buffer.is_nested or buffer.layout != torch.strided or buffer.is_quantized or buffer.is_conj():
        raise AttachError(
            f"buffer {name} is {_layout(buffer)}, which cannot be sent from rank to rank: keep a dense tensor there "
            "(to_dense(), resolve_conj()), or use an attribute that is not a buffer"
        )
    if buffer.is_meta:
        raise AttachError(
            f"buffer {name} is on the meta device and holds no values: materialise it (to_empty)"
        )
    if not _is_dense(buffer):
        raise AttachError(
            f"buffer {name} has overlapping or scattered elements (expanded or sliced?): make it contiguous "
            "before attach"
        )


def _layout(tensor: Tensor) -> str:
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return "quantized"
    return "conjugated" if tensor.is_conj() else str(tensor.layout)


def _check_memory(named: Mapping[str, Tensor]) -> None:
    """Refuse tensors that share memory without being one object, as attach would separate them."""
    trained_names = {name for name, tensor in named.items() if tensor.requires_grad}
    ranges = sorted(
        (
            (t.device.type, t.device.index or 0),
            t.data_ptr(),
            t.data_ptr() + t.nbytes,
            name,
            name in trained_names,
        )
        for name, t in ((name, local(tensor)) for name, tensor in named.items())
        if t.numel()
    )
    device, end, owner, trained = None, 0, "", False
    for where, start, stop, name, requires_grad in ranges:
        if where == device and start < end and (trained or requires_grad):
            raise AttachError(
                f"{owner} and {name} share memory but are two tensors, which attach would separate: make them one "
                "parameter (self.head.weight = self.embedding.weight), or copy one (clone())"
            )
        if where != device or stop > end:
            device, end, owner, trained = where, stop, name, requires_grad


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    held: set[int] = set()
    for optimizer in optimizers:
        own: set[int] = set()
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                own.add(id(parameter))
                if id(parameter) not in names and parameter.requires_grad:
                    raise AttachError(
                        f"the optimizer's parameter {position} of group {number} (shape {tuple(parameter.shape)}) is "
                        "not in the model: its gradients would stay on this rank. Put it into the model, or build the "
                        "optimizer from this model's parameters"
                    )
        if not own & set(names):
            raise AttachError(
                f"the optimizer ({type(optimizer).__name__}) holds none of the model's parameters"
                if len(optimizers) > 1
                else "the optimizer holds none of the model's parameters"
            )
        both = held & own
        if both:
            raise AttachError(
                f"parameter {names.get(both.pop())} is in two optimizers: leave it in one of them"
            )
        held |= own


def _is_a(given: object, where: str, name: str) -> bool:
    # By name: these live in parts of torch that need not be imported to know that they are not in use.
    return any(kind.__name__ == name and kind.__module__.startswith(where) for kind in type(given).__mro__)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill their memory without gaps or overlap, in any order of axes."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1:
            if stride != expected:
                return False
            expected *= length
    return True


def check_optimizer_terms(strategy: Strategy, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer without the terms that a compressor of the strategy, or of a phase, takes over.

    Raises:
        AttachError: names the compressor's key, and what to use.
    """
    for place, exchange in _exchanges(strategy):
        compressor = exchange.compressor
        if compressor is None or not compressor.traits.applies_optimizer_terms:
            continue
        try:
            optimizer_terms(optimizer)
        except AttachError as error:
            key = f"{place}{exchange.name}.compressor"
            other = compressor.without_optimizer_terms()
            override = "" if other.traits.applies_optimizer_terms else override_of(key, compressor, other)
            advice = f", or {override}" if override else ""
            problem = f"{key}: in {component_name(compressor)}, {error}{advice}"
            raise AttachError(problem, override) from error


def _exchanges(strategy: Strategy) -> Iterator[tuple[str, Exchange]]:
    """Yield all exchanges of gradients, with the place in the config where a phase has its own."""
    yield from (("", exchange) for exchange in strategy.gradients)
    before = strategy
    for phase in strategy.phases:
        for exchange in phase.strategy.gradients:
            if exchange not in before.gradients:
                yield f"phases.{phase.step}.", exchange
        before = phase.strategy


def override_of(key: str, given: object, wanted: object) -> str:
    """Return the shortest `KEY=VALUE` that turns one component into the other."""
    if type(given) is type(wanted) and is_dataclass(given):
        for field in fields(given):
            value, other = getattr(given, field.name), getattr(wanted, field.name)
            if isinstance(other, bool) and value != other:
                return f"{key}.{field.name}={str(other).lower()}"
            if value != other:
                return override_of(f"{key}.{field.name}", value, other)
    return f"{key}={flow(wanted)}"
