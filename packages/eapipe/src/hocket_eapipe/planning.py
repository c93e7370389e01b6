"""The cost of each stage to its holder, from the policy and one batch; the model stays as it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from hocket.api import Loss, PlannedStage, plain
from hocket_eapipe.configuration import PipelineConfig, Policy
from hocket_eapipe.memory import TensorBytes
from hocket_eapipe.mesh import Mesh
from hocket_eapipe.optimizers import Follower
from hocket_eapipe.passing import detached
from hocket_eapipe.schedule import warm_up
from hocket_eapipe.splitting import split
from hocket_eapipe.weights.api import copied


def plan_stages(
    engine: PipelineConfig,
    mesh: Mesh,
    model: nn.Module,
    optimizer: Optimizer,
    example: plain.Batch,
    loss: Loss,
) -> tuple[PlannedStage, ...]:
    """Plan all stages; see `Engine.plan_stages`. One forward and one backward of each stage are run on copies."""
    stages, value = [], example[0]
    with torch.random.fork_rng(devices=[]):
        for stage, module in enumerate(split(model, mesh.stages, engine.balance, engine.cuts)):
            is_last = stage == mesh.stages - 1
            passes = _Passes(module, value, example[1], loss if is_last else None, engine.micro_batches)
            stages.append(_planned(engine, mesh, stage, module, optimizer, passes))
            value = passes.output
    return tuple(stages)


class _Passes:
    """One forward and one backward of a stage on copies of its weights, and the memory that they held.

    Attributes:
        output: the value for the next stage.
        kept_bytes: bytes that a forward keeps for its backward, those of its input and output included.
        peak_bytes: the most bytes that either pass held, gradients included.
        sent_bytes: bytes of the output, and of the input's gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        value: plain.Batch,
        target: plain.Batch,
        loss: Loss | None,
        micro_batches: int,
    ) -> None:
        tensors = {name: copied(p) for name, p in module.named_parameters() if p.requires_grad}
        buffers = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        taken = detached(value)
        with TensorBytes() as counter:
            counter.count([*module.parameters(), *tensors.values(), *buffers.values()])
            weights = counter.held
            counter.count(_tensors(taken))
            output = functional_call(module, {**tensors, **buffers}, (taken,))
            ends = [loss(output, target)] if loss else [t for t in _tensors(output) if t.requires_grad]
            self.output = detached(output)
            if loss:
                del output
            self.kept_bytes = counter.held - weights
            self.peak_bytes = counter.peak - weights
            counter.peak = counter.held
            inputs = [leaf for leaf in _tensors(taken) if leaf.requires_grad]
            given = None if loss else [torch.ones_like(end) for end in ends]
            wanted = [*inputs, *tensors.values()]
            if ends and wanted:
                torch.autograd.grad(ends, wanted, given, allow_unused=True)
            self.peak_bytes = max(self.peak_bytes, counter.peak - weights)
        self.sent_bytes = _bytes(inputs) + (0 if loss else _bytes(_tensors(self.output)))
        # The last gradient that was handed to the stage before may not have left yet.
        self.peak_bytes += _bytes(inputs)
        if micro_batches > 1:
            # They share all this out, but for the parameters' gradients, which are as large for each, and added up.
            gradients = _bytes(tensors.values())
            self.kept_bytes = -(-self.kept_bytes // micro_batches)
            self.peak_bytes = 2 * gradients + max(0, -(-(self.peak_bytes - gradients) // micro_batches))


def _planned(
    engine: PipelineConfig, mesh: Mesh, stage: int, module: nn.Module, optimizer: Optimizer, passes: _Passes
) -> PlannedStage:
    trainable = [p for p in module.parameters() if p.requires_grad]
    weights = _bytes(trainable)
    all_weights = _bytes([*module.parameters(), *module.buffers()])
    ahead = warm_up(stage, mesh.stages)
    replicas, copies, under_way = 1, 0, ahead
    match engine.policy:
        case Policy.ELASTIC:
            replicas = mesh.stages
        case Policy.FLUSH:
            under_way = engine.micro_batches - 1
        case Policy.STASHING:
            copies = ahead + 1 if ahead else 0
        case Policy.VERTICAL_SYNC:
            copies = mesh.stages
        case Policy.SPECTRAIN:
            copies = 1
        case Policy.NAIVE:
            pass
    held = all_weights + copies * weights
    if engine.policy is Policy.ELASTIC:
        held += replicas * (weights + _bytes(module.buffers()))
    optimizers = replicas * _state_bytes(optimizer, trainable)
    activations = under_way * passes.kept_bytes
    names = [
        name.replace("/", ".")
        for name, child in module.named_modules()
        if name and not list(child.children())
    ]
    return PlannedStage(
        name=names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if names else "",
        num_parameters=sum(p.numel() for p in trainable),
        weights_bytes=held,
        optimizer_bytes=optimizers,
        activations_bytes=activations + passes.kept_bytes,
        peak_bytes=held + optimizers + activations + passes.peak_bytes,
        sent_bytes=passes.sent_bytes,
    )


def _state_bytes(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that an optimizer like the given one keeps for some parameters after a step."""
    copies = {parameter: copied(parameter) for parameter in parameters}
    if not copies:
        return 0
    like = Follower(optimizer, copies, None).optimizer
    for tensor in copies.values():
        tensor.grad = torch.zeros_like(tensor)
    like.step()
    return _bytes(t for state in like.state.values() for t in tree_leaves(state) if isinstance(t, Tensor))


def _tensors(value: plain.Batch) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
