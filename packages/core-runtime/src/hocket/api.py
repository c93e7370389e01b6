"""The names that a plugin may import, besides `hocket` itself, `hocket.errors` and `hocket.testing`.

Each name is imported when it is first used, so that a plugin's `plugin.py` imports no torch. A name that an author
needs and does not find is added to the table; five of them are modules.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

# The table: type checkers execute it, and Python reads it.
if TYPE_CHECKING:
    from hocket import draws as draws
    from hocket import messages as messages
    from hocket import plain as plain
    from hocket import schedule as schedule
    from hocket.arrays import Array as Array
    from hocket.arrays import MixingRows as MixingRows
    from hocket.checkpoint.files import StateFile as StateFile
    from hocket.collective.api import Channel as Channel
    from hocket.collective.api import Choices as Choices
    from hocket.collective.api import Collective as Collective
    from hocket.collective.api import CollectiveTraits as CollectiveTraits
    from hocket.collective.api import Cost as Cost
    from hocket.collective.api import Ends as Ends
    from hocket.collective.api import Outcome as Outcome
    from hocket.collective.packing import Packing as Packing
    from hocket.collective.scalable import ScalableChannel as ScalableChannel
    from hocket.collective.sparse import GatheringChannel as GatheringChannel
    from hocket.collective.sparse import SparseAlgorithm as SparseAlgorithm
    from hocket.collective.sparse import SparseAllreduce as SparseAllreduce
    from hocket.compressor.api import Compressor as Compressor
    from hocket.compressor.api import CompressorTraits as CompressorTraits
    from hocket.compressor.api import Footprint as Footprint
    from hocket.compressor.api import Message as Message
    from hocket.compressor.api import SparseValues as SparseValues
    from hocket.compressor.api import State as State
    from hocket.compressor.api import count_of as count_of
    from hocket.compressor.optimizer_terms import OptimizerTerms as OptimizerTerms
    from hocket.compressor.wrapper import Identity as Identity
    from hocket.compressor.wrapper import Wrapper as Wrapper
    from hocket.compressor.wrapper import WrapperState as WrapperState
    from hocket.installing import how_to_install as how_to_install
    from hocket.kernels.compiling import compiled as compiled
    from hocket.outer.api import Outer as Outer
    from hocket.own_files import claim as claim
    from hocket.plugin.markers import hookimpl as hookimpl
    from hocket.plugin.registrar import Registrar as Registrar
    from hocket.progress.engine import Activity as Activity
    from hocket.progress.engine import ProgressEngine as ProgressEngine
    from hocket.progress.executor import Execution as Execution
    from hocket.progress.thread import ThreadProgress as ThreadProgress
    from hocket.segment.partition import ParameterSpan as ParameterSpan
    from hocket.segment.segment import Segment as Segment
    from hocket.segment.shape import SegmentShape as SegmentShape
    from hocket.session.api import Attachment as Attachment
    from hocket.session.api import Loss as Loss
    from hocket.session.api import MakeOptimizer as MakeOptimizer
    from hocket.session.api import StepResult as StepResult
    from hocket.session.engine import Engine as Engine
    from hocket.session.engine import PlannedStage as PlannedStage
    from hocket.session.engine_session import EngineSession as EngineSession
    from hocket.session.exchange.active import Counters as Counters
    from hocket.session.ranks import broadcast_model as broadcast_model
    from hocket.session.replica_session import ReplicaSession as ReplicaSession
    from hocket.session.save.replica_state import load_into as load_into
    from hocket.strategy.samples import SampleShuffle as SampleShuffle
    from hocket.strategy.samples import SampleStream as SampleStream
    from hocket.task.api import Task as Task
    from hocket.task.api import TaskData as TaskData
    from hocket.task.classification import Classification as Classification
    from hocket.task.classification import ImageClassification as ImageClassification
    from hocket.task.samples import BatchedSamples as BatchedSamples
    from hocket.task.samples import Scaling as Scaling
    from hocket.task.samples import TensorSamples as TensorSamples
    from hocket.topology.api import Neighbours as Neighbours
    from hocket.topology.api import Topology as Topology
    from hocket.transport.host import sync as sync
    from hocket.transport.lane import Lane as Lane
    from hocket.transport.network import NetworkModel as NetworkModel
    from hocket.transport.peer import Peer as Peer
    from hocket.transport.peer import gather as gather
    from hocket.transport.reduction import TreeSum as TreeSum
    from hocket.transport.request import FunctionRequest as FunctionRequest
    from hocket.transport.request import Request as Request
    from hocket.transport.signals import Bells as Bells
    from hocket.transport.threads import wait_until as wait_until

#: The module of each name.
_HOMES: dict[str, str] = {
    name: home
    for home, name in re.findall(r"^    from (\S+) import (\w+) as", Path(__file__).read_text(), re.M)
}


def __dir__() -> list[str]:
    return sorted(_HOMES)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(_HOMES[name])
        found = getattr(home, name, None) or import_module(f"{home.__name__}.{name}")
        globals()[name] = found
        return found
