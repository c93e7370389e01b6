"""Alternating signs quantisation: indices and one number, half the bytes.

Source: Fang et al., "RedSync", section 2.2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from hocket.api import CompressorTraits, SegmentShape
from hocket_redsync.message import Content, MessageForm
from hocket_redsync.residual import ResidualCompressor
from hocket_redsync.selection import Method
from hocket_redsync.state import ResidualState

if TYPE_CHECKING:
    from hocket.api import Array, ParameterSpan


class Feedback(StrEnum):
    """The residual left where something was sent.

    Attributes:
        NOTHING: nothing, the paper's algorithm 1: a parameter's sum is kept, each element's own is not.
        ERROR: quantisation's error: the sent value is subtracted, so each element's own sum is kept, too.
    """

    NOTHING = "nothing"
    ERROR = "error"


@dataclass(frozen=True)
class Asq(ResidualCompressor):
    """Quantisation: in even rounds the k largest elements, in odd ones the k most negative, replaced by their mean.

    The elements of a round have one sign; if fewer than k have it, only those are sent. The sets are trimmed, never
    sampled. The output layer, the module that owns the model's last parameters, is sent with its values.

    Attributes:
        feedback: the residual that remains of sent elements: `nothing`, or the quantisation `error`.
        unquantised: name patterns of parameters to send unquantised.
    """

    feedback: Feedback = Feedback.NOTHING
    unquantised: list[str] = field(default_factory=list, hash=False)

    @property
    def traits(self) -> CompressorTraits:
        return replace(super().traits, selects=False)

    def method_of(self, span: ParameterSpan, nbytes: int) -> Method:
        return Method.TRIMMED

    def quantises(self, shape: SegmentShape, span: ParameterSpan) -> bool:
        return not (
            _in_output_layer(shape, span) or any(fnmatchcase(span.name, name) for name in self.unquantised)
        )

    def _clear(self, state: ResidualState, contents: Iterable[Content], sent: Array) -> None:
        if self.feedback is Feedback.NOTHING:
            super()._clear(state, contents, sent)
            return
        import torch

        for content in contents:
            places = torch.from_numpy(content.indices).to(state.residual.device).long()
            if content.form is MessageForm.MEAN:
                state.residual[places] -= float(content.values[0])
            else:
                state.residual[places] = 0


def _in_output_layer(shape: SegmentShape, span: ParameterSpan) -> bool:
    """Return whether a parameter belongs to the module of the model's last one.

    Segments of gradients are cut from the model's end, so that one is the first of segment 0. A layout that is only
    planned has no segment number, and counts as one without the last parameter.
    """
    if getattr(shape, "index", None) != 0:
        return False
    return _module(span) == _module(shape.spans[0])


def _module(span: ParameterSpan) -> str:
    return span.name.rpartition(".")[0]
