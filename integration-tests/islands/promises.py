"""What `hocket.segment.shards` stands on: promises of torch that its next version may break, each by itself.

Ranks write for each promise why it is broken, or nothing. Beside each stands a plain model that one process computes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.func import functional_call
from torch.nn import functional as F

from hocket.segment.shards import Shard, address_of, fsdp_modules, gathered, is_sharded, like, local
from hocket.session.torch_internals import at_end_of_backward, current_backward
from islands.cases import OPTIMIZERS, Case, batch, full, make
from islands.trained import shard

CASE = Case(["sgd"])
OF_TOKENS = Case(["sgd"], style="sp")
STYLES = ("nested", "root", "kept")
BOUND = 1e-12


def main(folder: Path, names: list[str]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    for name, promise in PROMISES.items():
        broken = ""
        try:
            promise(mesh)
        except Exception:
            broken = traceback.format_exc()
        (folder / f"{name} {distributed.get_rank()}.txt").write_text(broken)


def backward(model: Any, step: int, case: Case = CASE) -> None:
    x, y = batch(case, step, distributed.get_rank() if case is CASE else 0)
    F.cross_entropy(model(x), y).backward()


def whole_gradients(step: int, case: Case = CASE) -> dict[str, Tensor]:
    """Return the mean of both ranks' gradients, by one process; tensor parallelism has one batch."""
    whole, shares = make(case, 0), range(2) if case is CASE else range(1)
    for share in shares:
        x, y = batch(case, step, share)
        (F.cross_entropy(whole(x), y) / len(shares)).backward()
    return {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}


def shards_of(model: nn.Module) -> dict[str, Shard]:
    return {name: Shard.of(p) for name, p in model.named_parameters() if p.requires_grad}


def apart(given: Tensor, expected: Tensor) -> float:
    return float((given - expected).abs().max())


def hooks(mesh: Any) -> None:
    """Each hook runs once in a backward, within it, when the gradient is in; what backward's end calls runs last."""
    for style in STYLES:
        model: Any = shard(make(CASE, 0), mesh, style)
        came: list[tuple[str, int]] = []
        arrived: dict[str, Tensor] = {}
        shards = shards_of(model)  # whose hooks end with them
        for name, part in shards.items():
            part.register_post_accumulate_grad_hook(partial(note, name, came, arrived))
        for step in range(3):
            came.clear()
            arrived.clear()
            backward(model, step)
            expected = whole_gradients(step)
            names, backwards = zip(*came, strict=True)
            assert sorted(names[:-1]) == sorted(expected), (style, names)
            assert names[-1] == END
            assert len(set(backwards[:-1])) == 1
            assert min(backwards[:-1]) >= 0
            assert all(apart(gathered(arrived[name]), expected[name]) <= BOUND for name in expected), style
        without_gradient_sync(model, came)


END = "the end of backward"


def note(name: str, came: list[tuple[str, int]], arrived: dict[str, Tensor], part: Any) -> None:
    """Note the number of the backward, and the gradient, of which `p.grad` lets go."""
    if not came:
        at_end_of_backward(lambda: came.append((END, current_backward())))
    came.append((name, current_backward()))
    arrived[name] = like(part.whole, part.grad.clone())
    part.grad = None


def without_gradient_sync(model: Any, came: list[tuple[str, int]]) -> None:
    """No hook runs, and no gradient is where an optimizer would take it from."""
    came.clear()
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    assert not came
    assert all(p.grad is None for p in model.parameters())


def gradients(mesh: Any) -> None:
    """Optimizers and later backwards take what is put into `p.grad`, as they take FSDP's own: bit for bit."""
    for build in BUILDS:
        expected, given = (stepped(build(mesh), taken_over=each) for each in (False, True))
        assert all(torch.equal(given[name], expected[name]) for name in expected)
    for style in ("tp", "sp"):
        case = OF_TOKENS if style == "sp" else Case(["sgd"], style="tp")
        model = shard(make(case, 0), mesh, style)
        shards = shards_of(model)
        backward(model, 0, case)
        for name, expected_gradient in whole_gradients(0, case).items():
            whole = shards[name].whole
            came: Any = shards[name].grad
            placed = like(whole, came) if is_sharded(whole) else came
            assert apart(gathered(placed), expected_gradient) <= BOUND, (style, name)


def mixed(mesh: Any) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = make(Case(["sgd"], double=False), 0)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    return model


BUILDS: list[Callable[[Any], Any]] = [
    *(lambda mesh, style=style: shard(make(CASE, 0), mesh, style) for style in STYLES),
    mixed,
]


def stepped(model: Any, *, taken_over: bool) -> dict[str, Tensor]:
    """Train some steps, two backwards each; a hook moves each gradient to memory that stays, as an exchange does."""
    optimizer = OPTIMIZERS["foreach"](list(model.parameters()))
    buffers = {}
    if taken_over:
        for part in shards_of(model).values():
            buffers[part] = torch.zeros_like(part)
            part.register_post_accumulate_grad_hook(lambda part: keep(part, buffers[part]))  # type: ignore[index]
    dtype = next(model.parameters()).dtype
    for step in range(4):
        optimizer.zero_grad()
        for number in range(2):
            x, y = batch(CASE, 2 * step + number, distributed.get_rank())
            F.cross_entropy(model(x.to(dtype)), y).backward()
            for part, buffer in buffers.items():
                if part.whole.grad is None and buffer.any():
                    part.grad = buffer
        optimizer.step()
        for buffer in buffers.values():
            buffer.zero_()
    return full(model)


def keep(part: Any, buffer: Tensor) -> None:
    buffer.copy_(part.grad)
    part.grad = None


def memory(mesh: Any) -> None:
    """The local part of a parameter is the memory that FSDP gathers, however it is written to."""
    for style in STYLES:
        model: Any = shard(make(CASE, 0), mesh, style)
        optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
        for step in range(3):
            write_and_compare(model, step)
            backward(model, step)
            optimizer.step()
            state = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
            reshard(model)
            model.load_state_dict(state)
            assert all(bool((value == 1).all()) for value in full(model).values())


def write_and_compare(model: Any, seed: int) -> None:
    """Write values without torch's notice; compare the next forward with a whole model that has them."""
    whole, drawn = make(CASE, 0), torch.Generator().manual_seed(seed)
    values = {}
    reshard(model)
    for name, parameter in model.named_parameters():
        values[name] = torch.randn(parameter.shape, generator=drawn, dtype=parameter.dtype)
        parts = values[name].chunk(2)
        part = local(parameter)
        assert address_of(parameter) == part.data_ptr()
        rank = distributed.get_rank()
        part.detach().numpy()[...] = parts[rank] if rank < len(parts) else parts[0][:0]
        assert torch.equal(gathered(parameter), values[name])
    x, _ = batch(CASE, seed, 0)
    with torch.no_grad():
        assert apart(model(x), functional_call(whole, values, (x,), strict=False)) <= BOUND


def reshard(model: nn.Module) -> None:
    for module in fsdp_modules(model):
        module.reshard()


def resharding(mesh: Any) -> None:
    """`reshard` drops what any forward has gathered: modules show their shards, and the next forward reads them."""
    for style in (*STYLES, "prefetched"):
        model: Any = shard(make(CASE, 0), mesh, "nested" if style == "prefetched" else style)
        if style == "prefetched":
            model.set_modules_to_forward_prefetch(list(model.blocks))
        x, _ = batch(CASE, 0, 0)
        for step in range(3):
            with torch.no_grad():
                model(x)
            assert not all(map(is_sharded, model.parameters())), "nothing was left gathered"
            reshard(model)
            assert all(map(is_sharded, model.parameters()))
            write_and_compare(model, step)


PROMISES: dict[str, Callable[[Any], None]] = {
    "hooks": hooks,
    "gradients": gradients,
    "memory": memory,
    "reshard": resharding,
}
