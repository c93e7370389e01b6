"""The names that a plugin may import, besides `hocket` itself and `hocket.testing`.

Each name is imported when it is first used, so that a plugin's `plugin.py` imports no torch. What a plugin needs and
does not find here is added here: a name for type checkers and its module for Python.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket import draws as draws
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
    from hocket.collective.scalable import SHARES as SHARES
    from hocket.collective.scalable import ScalableChannel as ScalableChannel
    from hocket.collective.scalable import bytes_to_each as bytes_to_each
    from hocket.collective.scalable import scalable_cost as scalable_cost
    from hocket.collective.sparse import GatheringChannel as GatheringChannel
    from hocket.collective.sparse import SparseAlgorithm as SparseAlgorithm
    from hocket.collective.sparse import SparseAllreduce as SparseAllreduce
    from hocket.collective.sparse import gather_cost as gather_cost
    from hocket.compressor.api import Compressor as Compressor
    from hocket.compressor.api import CompressorTraits as CompressorTraits
    from hocket.compressor.api import Footprint as Footprint
    from hocket.compressor.api import Message as Message
    from hocket.compressor.api import SegmentShape as SegmentShape
    from hocket.compressor.api import SparseValues as SparseValues
    from hocket.compressor.api import State as State
    from hocket.compressor.api import count_of as count_of
    from hocket.compressor.api import dtype_of as dtype_of
    from hocket.compressor.api import numel_of as numel_of
    from hocket.compressor.api import trailer_bytes as trailer_bytes
    from hocket.compressor.api import whole_bytes as whole_bytes
    from hocket.compressor.optimizer_terms import OptimizerTerms as OptimizerTerms
    from hocket.compressor.topk import check_indexable as check_indexable
    from hocket.compressor.wrappers import Identity as Identity
    from hocket.compressor.wrappers import SentMomentum as SentMomentum
    from hocket.compressor.wrappers import Wrapper as Wrapper
    from hocket.compressor.wrappers import WrapperState as WrapperState
    from hocket.compressor.wrappers import add_at as add_at
    from hocket.errors import AttachError as AttachError
    from hocket.errors import CheckpointError as CheckpointError
    from hocket.errors import CompositionError as CompositionError
    from hocket.errors import HocketError as HocketError
    from hocket.errors import PeerLostError as PeerLostError
    from hocket.errors import UserError as UserError
    from hocket.errors import suggest as suggest
    from hocket.installing import how_to_install as how_to_install
    from hocket.kernels.compiling import compiled as compiled
    from hocket.messages import Form as Form
    from hocket.messages import TensorForm as TensorForm
    from hocket.messages import as_bytes as as_bytes
    from hocket.messages import put_together as put_together
    from hocket.messages import take_apart as take_apart
    from hocket.outer.api import Outer as Outer
    from hocket.own_files import claim as claim
    from hocket.pictures import NO_PICTURE as NO_PICTURE
    from hocket.pictures import new_figure as new_figure
    from hocket.plugin.markers import hookimpl as hookimpl
    from hocket.plugin.registrar import Registrar as Registrar
    from hocket.progress.engine import ProgressEngine as ProgressEngine
    from hocket.progress.executor import Execution as Execution
    from hocket.progress.thread import ThreadProgress as ThreadProgress
    from hocket.schedule.builders import activation_broadcast as activation_broadcast
    from hocket.schedule.builders import allgather as allgather
    from hocket.schedule.builders import alltoall as alltoall
    from hocket.schedule.builders import recursive_doubling_allreduce as recursive_doubling_allreduce
    from hocket.schedule.builders import ring_allreduce as ring_allreduce
    from hocket.schedule.builders import tree_allreduce as tree_allreduce
    from hocket.schedule.operations import Compute as Compute
    from hocket.schedule.operations import Gate as Gate
    from hocket.schedule.operations import Logic as Logic
    from hocket.schedule.operations import NoOp as NoOp
    from hocket.schedule.operations import Operation as Operation
    from hocket.schedule.operations import Receive as Receive
    from hocket.schedule.operations import Send as Send
    from hocket.schedule.schedule import Schedule as Schedule
    from hocket.schedule.schedule import chain as chain
    from hocket.segment.partition import Span as Span
    from hocket.segment.segment import Segment as Segment
    from hocket.segment.segment import allocate as allocate
    from hocket.session.api import Attachment as Attachment
    from hocket.session.api import Batch as Batch
    from hocket.session.api import Loss as Loss
    from hocket.session.api import MakeOptimizer as MakeOptimizer
    from hocket.session.api import StepResult as StepResult
    from hocket.session.api import TrainingSession as TrainingSession
    from hocket.session.core import SessionState as SessionState
    from hocket.session.engine import Engine as Engine
    from hocket.session.engine import PlannedStage as PlannedStage
    from hocket.session.exchange import Counters as Counters
    from hocket.session.ranks import broadcast_model as broadcast_model
    from hocket.session.replica_state import load_into as load_into
    from hocket.session.session import Session as Session
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
    from hocket.transport.launching import launch as launch
    from hocket.transport.mpiexec import find_mpiexec as find_mpiexec
    from hocket.transport.network import NetworkModel as NetworkModel
    from hocket.transport.network import recursive_doubling_cost as recursive_doubling_cost
    from hocket.transport.network import ring_cost as ring_cost
    from hocket.transport.network import star_cost as star_cost
    from hocket.transport.peer import Peer as Peer
    from hocket.transport.peer import gather as gather
    from hocket.transport.reduction import TreeSum as TreeSum
    from hocket.transport.request import FunctionRequest as FunctionRequest
    from hocket.transport.request import Request as Request
    from hocket.transport.request import all_of as all_of
    from hocket.transport.threads import describe_wait as describe_wait
    from hocket.transport.waiting import CHECK_EVERY_S as CHECK_EVERY_S
    from hocket.transport.waiting import wait as wait

#: The module of each name; the last two are modules themselves.
_HOMES = {
    "Array": "hocket.arrays",
    "MixingRows": "hocket.arrays",
    "StateFile": "hocket.checkpoint.files",
    "Channel": "hocket.collective.api",
    "Choices": "hocket.collective.api",
    "Collective": "hocket.collective.api",
    "CollectiveTraits": "hocket.collective.api",
    "Cost": "hocket.collective.api",
    "Ends": "hocket.collective.api",
    "Outcome": "hocket.collective.api",
    "Packing": "hocket.collective.packing",
    "SHARES": "hocket.collective.scalable",
    "ScalableChannel": "hocket.collective.scalable",
    "bytes_to_each": "hocket.collective.scalable",
    "scalable_cost": "hocket.collective.scalable",
    "GatheringChannel": "hocket.collective.sparse",
    "SparseAlgorithm": "hocket.collective.sparse",
    "SparseAllreduce": "hocket.collective.sparse",
    "gather_cost": "hocket.collective.sparse",
    "Compressor": "hocket.compressor.api",
    "CompressorTraits": "hocket.compressor.api",
    "Footprint": "hocket.compressor.api",
    "Message": "hocket.compressor.api",
    "SegmentShape": "hocket.compressor.api",
    "SparseValues": "hocket.compressor.api",
    "State": "hocket.compressor.api",
    "count_of": "hocket.compressor.api",
    "dtype_of": "hocket.compressor.api",
    "numel_of": "hocket.compressor.api",
    "trailer_bytes": "hocket.compressor.api",
    "whole_bytes": "hocket.compressor.api",
    "OptimizerTerms": "hocket.compressor.optimizer_terms",
    "check_indexable": "hocket.compressor.topk",
    "SentMomentum": "hocket.compressor.wrappers",
    "Identity": "hocket.compressor.wrappers",
    "Wrapper": "hocket.compressor.wrappers",
    "WrapperState": "hocket.compressor.wrappers",
    "add_at": "hocket.compressor.wrappers",
    "AttachError": "hocket.errors",
    "CheckpointError": "hocket.errors",
    "CompositionError": "hocket.errors",
    "HocketError": "hocket.errors",
    "PeerLostError": "hocket.errors",
    "UserError": "hocket.errors",
    "suggest": "hocket.errors",
    "how_to_install": "hocket.installing",
    "compiled": "hocket.kernels.compiling",
    "Form": "hocket.messages",
    "TensorForm": "hocket.messages",
    "as_bytes": "hocket.messages",
    "put_together": "hocket.messages",
    "take_apart": "hocket.messages",
    "Outer": "hocket.outer.api",
    "NO_PICTURE": "hocket.pictures",
    "new_figure": "hocket.pictures",
    "claim": "hocket.own_files",
    "hookimpl": "hocket.plugin.markers",
    "Registrar": "hocket.plugin.registrar",
    "ProgressEngine": "hocket.progress.engine",
    "Execution": "hocket.progress.executor",
    "ThreadProgress": "hocket.progress.thread",
    "activation_broadcast": "hocket.schedule.builders",
    "allgather": "hocket.schedule.builders",
    "alltoall": "hocket.schedule.builders",
    "recursive_doubling_allreduce": "hocket.schedule.builders",
    "ring_allreduce": "hocket.schedule.builders",
    "tree_allreduce": "hocket.schedule.builders",
    "Compute": "hocket.schedule.operations",
    "Gate": "hocket.schedule.operations",
    "Logic": "hocket.schedule.operations",
    "NoOp": "hocket.schedule.operations",
    "Operation": "hocket.schedule.operations",
    "Receive": "hocket.schedule.operations",
    "Send": "hocket.schedule.operations",
    "Schedule": "hocket.schedule.schedule",
    "chain": "hocket.schedule.schedule",
    "Span": "hocket.segment.partition",
    "Segment": "hocket.segment.segment",
    "allocate": "hocket.segment.segment",
    "Attachment": "hocket.session.api",
    "Batch": "hocket.session.api",
    "Loss": "hocket.session.api",
    "MakeOptimizer": "hocket.session.api",
    "SessionState": "hocket.session.core",
    "StepResult": "hocket.session.api",
    "TrainingSession": "hocket.session.api",
    "load_into": "hocket.session.replica_state",
    "Engine": "hocket.session.engine",
    "PlannedStage": "hocket.session.engine",
    "Counters": "hocket.session.exchange",
    "broadcast_model": "hocket.session.ranks",
    "Session": "hocket.session.session",
    "SampleShuffle": "hocket.strategy.samples",
    "SampleStream": "hocket.strategy.samples",
    "Task": "hocket.task.api",
    "TaskData": "hocket.task.api",
    "Classification": "hocket.task.classification",
    "ImageClassification": "hocket.task.classification",
    "BatchedSamples": "hocket.task.samples",
    "Scaling": "hocket.task.samples",
    "TensorSamples": "hocket.task.samples",
    "Neighbours": "hocket.topology.api",
    "Topology": "hocket.topology.api",
    "Lane": "hocket.transport.lane",
    "find_mpiexec": "hocket.transport.mpiexec",
    "launch": "hocket.transport.launching",
    "NetworkModel": "hocket.transport.network",
    "recursive_doubling_cost": "hocket.transport.network",
    "ring_cost": "hocket.transport.network",
    "star_cost": "hocket.transport.network",
    "Peer": "hocket.transport.peer",
    "gather": "hocket.transport.peer",
    "TreeSum": "hocket.transport.reduction",
    "FunctionRequest": "hocket.transport.request",
    "Request": "hocket.transport.request",
    "all_of": "hocket.transport.request",
    "describe_wait": "hocket.transport.threads",
    "CHECK_EVERY_S": "hocket.transport.waiting",
    "wait": "hocket.transport.waiting",
    "draws": "hocket.draws",
    "sync": "hocket.transport.host.sync",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = import_module(_HOMES[name])
        found = globals()[name] = home if home.__name__.endswith(f".{name}") else getattr(home, name)
        return found
