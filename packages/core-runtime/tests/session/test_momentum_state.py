"""Momentum that a compressor keeps, as a program finds it in the optimizer's state: what is read is what is used."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from toys import on_ranks

import hocket
from hocket.testing.account import LAYERS, Sums, sample

BUFFER = "momentum_buffer"
STEPS = 5
COMPRESSORS: dict[str, Any] = {
    "corrected": {
        "name": "momentum_correction",
        "masking": False,
        "compressor": {"name": "error_feedback", "compressor": {"name": "topk", "density": 1.0}},
    },
    "without feedback": {"name": "momentum_correction", "masking": False, "compressor": "none"},
}


def strategy(compressor: str, overlap: str = "none") -> dict[str, Any]:
    collective = "sparse_allreduce" if compressor == "corrected" else "allreduce"
    fields = {"compressor": COMPRESSORS[compressor], "segments": "layers", "overlap": overlap}
    return {"gradients": [{"collective": collective, **fields}]}


class Program:
    """A loop that does something with its optimizer's state before the backward of a step, or after it has stepped."""

    def __init__(self, *, nesterov: bool = False) -> None:
        self.model = Sums()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(
            self.parameters, lr=0.1, momentum=0.5, weight_decay=0.1, nesterov=nesterov
        )
        self.held: list[Tensor] = []
        self.read: list[Tensor] = []

    def buffers(self) -> list[Tensor]:
        return [self.optimizer.state[parameter][BUFFER] for parameter in self.parameters]

    def run(self, batches: Callable[[int], list[Tensor]], act: Callable[[Program, int], None]) -> None:
        for step in range(STEPS):
            act(self, step)
            sum(self.model(x, range(LAYERS)) for x in batches(step)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def values(self) -> Tensor:
        return torch.cat([parameter.detach() for parameter in self.parameters])


def clear(program: Program, step: int) -> None:
    if step == 2:
        program.optimizer.state.clear()


def replace_all(program: Program, step: int) -> None:
    if step == 2:
        program.optimizer.state = defaultdict(dict)


def clear_one(program: Program, step: int) -> None:
    if step == 2:
        del program.optimizer.state[program.parameters[1]]
        assert BUFFER not in program.optimizer.state[program.parameters[1]]


def take_out(program: Program, step: int) -> None:
    if step == 2:
        program.optimizer.state[program.parameters[0]].pop(BUFFER)
        program.optimizer.state[program.parameters[1]][BUFFER] = None


def read(program: Program, step: int) -> None:
    if step:
        program.read += [buffer.clone() for buffer in program.buffers()]
        values = [dict(program.optimizer.state[p])[BUFFER] for p in program.parameters]
        program.read += [value.clone() for value in values]
    else:
        assert not program.optimizer.state


def halve(program: Program, step: int) -> None:
    if step == 2:
        for buffer in program.buffers():
            buffer.mul_(0.5)


def zero_by_data(program: Program, step: int) -> None:
    if step in (2, 3):
        for state in program.optimizer.state.values():
            state[BUFFER].data.zero_()


def write_into_views(program: Program, step: int) -> None:
    """Views that were taken once are the optimizer's own memory."""
    if step == 1:
        program.held = [buffer[:, :3] for buffer in program.buffers()]
    elif step in (3, 4):
        program.read += [view.clone() for view in program.held]
        for view in program.held:
            view.fill_(1.0)


def keep(program: Program, step: int) -> None:
    """Buffers that were looked up once, read and written later."""
    if step == 1:
        program.held = program.buffers()
    elif step in (3, 4):
        program.read += [buffer.clone() for buffer in program.held]
        for buffer in program.held:
            buffer.add_(1.0)


def put_in(program: Program, step: int) -> None:
    """Tensors of the program's own, which the optimizer goes on with."""
    if step == 1:
        program.held = [torch.full_like(p.detach(), 2.0) for p in program.parameters]
        for parameter, buffer in zip(program.parameters, program.held, strict=True):
            program.optimizer.state[parameter][BUFFER] = buffer
    elif step == 3:
        program.read += [buffer.clone() for buffer in program.held]
        for parameter, buffer in zip(program.parameters, program.held, strict=True):
            buffer.zero_()
            program.optimizer.state[parameter] = {BUFFER: torch.ones_like(buffer)}


def load_own(program: Program, step: int) -> None:
    if step == 2:
        saved = copy.deepcopy(program.optimizer.state_dict())
        assert all(type(state) is dict for state in saved["state"].values())
        for state in saved["state"].values():
            state[BUFFER].mul_(3.0)
        program.optimizer.load_state_dict(saved)


def begin_with_momentum(program: Program, step: int) -> None:
    if step == 0:
        for parameter in program.parameters:
            program.optimizer.state[parameter][BUFFER] = torch.full_like(parameter, 3.0)


ACTS = [clear, replace_all, clear_one, take_out, read, halve, zero_by_data, write_into_views, keep, put_in]
ACTS += [load_own, begin_with_momentum]


def check(act: Callable[[Program, int], None], given: dict[str, Any], *, nesterov: bool = False) -> None:
    """Compare with one process, where the ranks' mean of what they read is what that reads."""

    def run(rank: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        program = Program(nesterov=nesterov)
        with hocket.attach(program.model, program.optimizer, given):
            program.run(lambda step: [sample(step, rank)], act)
        return program.values, program.read, program.buffers()

    plain = Program(nesterov=nesterov)
    plain.run(lambda step: [sample(step, rank) / 2 for rank in range(2)], act)
    ended = on_ranks(2, run)
    for values, _, buffers in ended:
        torch.testing.assert_close(values, plain.values, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(buffers, plain.buffers(), rtol=1e-12, atol=1e-12)
    means = [torch.stack(of_ranks).mean(0) for of_ranks in zip(*(told for _, told, _ in ended), strict=True)]
    torch.testing.assert_close(means, plain.read, rtol=1e-12, atol=1e-12)


@pytest.mark.one_of_each
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_the_optimizers_state_is_what_is_used(
    act: Callable[[Program, int], None], compressor: str, caplog: pytest.LogCaptureFixture
) -> None:
    check(act, strategy(compressor))
    assert "was changed" not in caplog.text


@pytest.mark.parametrize("act", [clear, halve, keep])
def test_it_is_so_with_nesterov_and_within_backward(act: Callable[[Program, int], None]) -> None:
    check(act, strategy("corrected", overlap="backward"), nesterov=True)


def test_states_are_copied_and_pickled_as_plain_mappings() -> None:
    def run(rank: int) -> None:
        program = Program()
        with hocket.attach(program.model, program.optimizer, strategy("corrected")):
            program.run(lambda step: [sample(step, rank)], lambda *_: None)
            state = program.optimizer.state[program.parameters[0]]
            state["other"] = 1
            expected = {BUFFER: state[BUFFER].clone(), "other": 1}
            for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), state.copy(), {**state}):
                assert type(other) is dict
                torch.testing.assert_close(other, expected, rtol=0, atol=0)

    on_ranks(2, run)


def test_momentum_that_is_written_between_backward_and_step_counts_from_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told, once, with the parameter and a cure; after that what was written is what is used."""

    def run(rank: int) -> list[Tensor]:
        program = Program()
        with hocket.attach(program.model, program.optimizer, strategy("corrected")):
            program.run(lambda step: [sample(step, rank)], lambda *_: None)
            for step in range(2):
                program.model(sample(step, rank), range(LAYERS)).backward()
                program.optimizer.state.clear()
                program.optimizer.step()
                program.optimizer.zero_grad()
            return [buffer.clone() for buffer in program.buffers()]

    told = on_ranks(2, run)
    lines = [record.getMessage() for record in caplog.records if "was changed" in record.getMessage()]
    assert len(lines) == 2
    assert all("layers.0.weight" in line and "error_feedback" in line for line in lines)
    assert not any(buffer.any() for buffers in told for buffer in buffers)


def test_gradients_that_are_dropped_leave_what_was_written_meanwhile() -> None:
    def act(program: Program, step: int) -> None:
        if step == 2:
            program.model(sample(9, 0), range(LAYERS)).backward()
            program.optimizer.zero_grad()
            for state in program.optimizer.state.values():
                state[BUFFER].fill_(2.0)

    check(act, strategy("corrected"))
