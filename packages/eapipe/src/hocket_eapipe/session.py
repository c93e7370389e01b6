"""A session whose model is shared out: each rank trains its stages, each with a session over all holders."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, replace

import torch
from torch import Tensor

from hocket.api import (
    Attachment,
    EngineSession,
    Loss,
    Peer,
    ReplicaSession,
    StateFile,
    StepResult,
    broadcast_model,
    load_into,
    plain,
)
from hocket.errors import AttachError, CheckpointError, CompositionError
from hocket_eapipe.absent import AbsentStages
from hocket_eapipe.clipping import clip_by_whole_norm
from hocket_eapipe.configuration import BatchNormStatistics, PipelineConfig, Policy
from hocket_eapipe.mesh import Mesh
from hocket_eapipe.optimizers import Follower
from hocket_eapipe.passing import MessageReceiver, MessageSender
from hocket_eapipe.reestimation import Reestimation
from hocket_eapipe.runner import Runner, StageNeighbours
from hocket_eapipe.splitting import split
from hocket_eapipe.stage import Stage, StagePosition
from hocket_eapipe.weights import NoWeights, StagePart
from hocket_eapipe.weights.policies import weights_of


class PipelineSession(EngineSession):
    """One rank of a mesh of pipelines.

    `train_batch` is called with every batch on every rank; those of one pipeline read the same batches
    (`data_rank`). Only the last stage's rank gets results. `settle` drains the pipeline: it runs the backwards of all
    batches under way, as `consensus`, `save` and `close` do.

    The optimizer given to `attach` steps nothing: the stages' own follow its values (learning rate, ...), of all
    groups, in each step. It is still called after each batch, without gradients, for its schedulers and hooks. So
    gradients are clipped by the engine's `clip_grad_norm`.

    The batches within `accumulate`, and the next one after it, are parts of one batch to the weight policy and the
    optimizers, of which each stage keeps the activations until its end. The loss of each is its share of the whole
    one's: K batches of one size divide theirs by K.

    Attributes:
        mesh: the holders of the stages.
        stages: this rank's stages, in order.
    """

    def __init__(self, engine: PipelineConfig, given: Attachment) -> None:
        super().__init__(given)
        self._engine = engine
        self.mesh = self._mesh_of(given, self.size)
        self.data_rank, self.data_size = self.mesh.pipeline_of(self.rank), self.mesh.pipelines
        if given.initial == "rank0":
            broadcast_model(given.model, self.control)
        self._modules = split(given.model, self.mesh.stages, engine.balance, engine.cuts)
        # A job goes on saving where it saved, and the stages with their periods and phases.
        self.count_on()
        place = self.mesh.place_of(self.rank)
        data_peer = _group(self.peer, self.mesh.data_ranks(place))
        pipe_peer = _group(self.peer, self.mesh.pipeline_ranks(self.data_rank))
        with ExitStack() as undo:  # what fails leaves no stage attached
            self.stages = [
                self._open_stage(stage, given, data_peer, undo) for stage in self.mesh.stages_of(place)
            ]
            self.replicas_equal = all(session.replicas_equal for session in self._sessions)
            self._lanes = [pipe_peer.lane(name) for name in ("activations", "gradients", "model")]
            self._absent = AbsentStages(self._modules, self.mesh, place, self._lanes[2])
            self._runner = Runner(
                self.stages,
                self.mesh.stages,
                self._neighbours(place),
                flushes=engine.policy is Policy.FLUSH,
                micro_batches=engine.micro_batches,
                clip=self._clip if engine.clip_grad_norm is not None else None,
            )
            self._norms = pipe_peer.lane("norms")
            #: Whether nothing has been done yet with the batch that was handed out.
            self._left_out = False
            reestimates = (
                engine.policy is Policy.ELASTIC and engine.buffers is BatchNormStatistics.REESTIMATED
            )
            self._reestimation = Reestimation(self._runner) if reestimates else None
            self._weight = 1.0
            undo.pop_all()

    def _mesh_of(self, given: Attachment, size: int) -> Mesh:
        """Return the mesh of all ranks; refuse what no pipeline can do."""
        if len(given.optimizers) > 1:
            raise AttachError(
                f"a pipeline takes one optimizer, not {self.optimizers.kind}: each stage gets a copy of it"
            )
        try:
            mesh = self._engine.mesh(size)
        except ValueError as error:
            raise CompositionError(f"engine.{error}") from error
        if given.strategy.samples is not None and mesh.processes > 1:
            raise CompositionError(
                "the strategy exchanges samples, but ranks of one pipeline must read the same samples: use `samples: "
                "null`, or pipelines of one rank"
            )
        return mesh

    def _open_stage(self, stage: int, given: Attachment, data_peer: Peer, undo: ExitStack) -> Stage:
        module = self._modules[stage]
        names = [name for name, _ in module.named_modules() if name]
        span = f" ({_full(names[0])} to {_full(names[-1])})" if names else ""
        place = StagePosition(
            f"stage {stage + 1} of {self.mesh.stages}{span}",
            stage,
            self.rank,
            self.data_rank,
            self._engine.seed,
        )
        parameters = {p: p for p in module.parameters() if p.requires_grad}
        if not parameters:
            return Stage(module, None, NoWeights(), place)
        leader = Follower(self.optimizer, parameters, given.make_optimizer)
        # The dots in the names of a stage's layers are slashes.
        self.note_counts(module)
        statistics = tuple(pattern.replace(".", "?") for pattern in given.statistics)
        alone = replace(given, model=module, optimizers=(leader.optimizer,), peer=data_peer, observer=None)
        session = ReplicaSession(replace(alone, statistics=statistics))
        undo.callback(session.abandon)
        session.count_into(self.counters)
        part = StagePart(module, session, stage, self.mesh.stages)
        return Stage(module, session, weights_of(self._engine, part, leader, given.make_optimizer), place)

    def _neighbours(self, place: int) -> StageNeighbours:
        found = StageNeighbours()
        activations, gradients = self._lanes[:2]
        device = next(
            (p.device for stage in self.stages for p in stage.module.parameters()), torch.device("cpu")
        )
        if place > 0:
            found.activations_from = MessageReceiver(
                activations, place - 1, device, self.peer.clock.now, self.counters
            )
            found.gradients_to = MessageSender(gradients, place - 1, self.counters)
        if place < self.mesh.processes - 1:
            found.activations_to = MessageSender(activations, place + 1, self.counters)
            found.gradients_from = MessageReceiver(
                gradients, place + 1, device, self.peer.clock.now, self.counters
            )
        return found

    @property
    def _sessions(self) -> list[ReplicaSession]:
        """The sessions of the stages that have parameters."""
        return [stage.session for stage in self.stages if stage.session is not None]

    # ---- the loop ----------------------------------------------------------------------------------------------

    def train_batch(self, batch: plain.Batch, loss: Loss) -> StepResult | None:
        self.require("session.train_batch", training=True)
        self._absent.release()
        self.note_phase("forward and backward")
        if self._reestimation is not None:
            self._reestimation.remember(batch[0])
        self._left_out = False
        result = self._runner.run(batch, loss, self._weight, is_last=not self.state.accumulating)
        if not self.state.accumulating:
            self._end_step()
        return result

    def _end_step(self) -> None:
        """Count a batch that has come, whether its gradients have been applied already or will be."""
        self.state.move("begin")
        self.optimizer.step()
        self._count_skipped()
        self.step += 1
        self._observer.step_ended(self.step - 1, self.peer.clock.now())
        self.peer.status.note_step(self.step)
        self.step_ended(self.step - 1)

    def _count_skipped(self) -> None:
        # What is not finite spreads from stage to stage: the one with most has left out what the others have, and more.
        self.skipped_steps = max((session.skipped_steps for session in self._sessions), default=0)

    def _clip(self) -> None:
        assert self._engine.clip_grad_norm is not None
        clip_by_whole_norm(self._sessions, self._engine.clip_grad_norm, self._norms)

    @property
    def weight(self) -> float:
        return self._weight

    def begin_batch(self, weight: float) -> None:
        self._weight, self._left_out = weight, True

    def end_batch(self) -> None:
        """Let a batch pass with which nothing was done; the step of others comes with their backward, batches later."""
        if not self._left_out or self._runner.accumulates or self.evaluates:
            return
        self.warn_once(
            "rank %d did not call session.train_batch() with the batch of step %d: its whole pipeline skips the "
            "batch, and steps with the gradients of other pipelines. To validate, read the loader itself",
            self.rank,
            self.step,
        )
        self._runner.leave_out()
        self._end_step()

    def end_pass(self) -> None:
        self._weight = 1.0

    def delay(self, seconds: float) -> None:
        self.peer.clock.sleep(seconds)

    # ---- replicas ----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.require("settle")
        self.begin_collective("session.settle")
        with ExitStack() as settling:
            for session in self._sessions:
                settling.enter_context(session.settling_together())
            self._runner.drain()
        self._count_skipped()

    def consensus(self) -> AbstractContextManager[None]:
        """Set the whole model, on every rank, to the mean of the pipelines' masters; collective.

        The pipeline is drained. At the end of a `with` statement, ranks free again the parameters they do not train.
        """
        self.settle()
        if self._reestimation is not None:
            self._reestimation.carry_out()
        own = [session.consensus() for session in self._sessions]
        return self._whole(own)

    def replica(self) -> AbstractContextManager[None]:
        """Let the model hold this pipeline's master, whole, in a `with` statement; collective."""
        self.settle()
        return self._whole([])

    def _whole(self, inner: Sequence[AbstractContextManager[None]]) -> AbstractContextManager[None]:
        self._absent.fetch()
        return self._restored(inner)

    @contextmanager
    def _restored(self, inner: Sequence[AbstractContextManager[None]]) -> Iterator[None]:
        with ExitStack() as stack:
            for context in inner:
                stack.enter_context(context)
            yield
        self._absent.release()

    def consensus_distance(self) -> float:
        self.settle()
        squares = sum(session.consensus_distance() ** 2 for session in self._sessions)
        # Every pipeline tells each stage's once.
        return math.sqrt(sum(self.gather(squares)) / self.mesh.pipelines)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def end_step_to_save(self) -> None:
        """Drain the pipeline: batches under way are no part of a checkpoint."""
        if self._runner.accumulates:
            raise CheckpointError(
                f"rank {self.rank}: a checkpoint does not hold accumulated gradients: save after a batch outside of "
                "session.accumulate()"
            )
        self.settle()

    def compare_replicas(self, call: str) -> None:
        for session in self._sessions:
            session.compare_replicas(call)

    def describe(self) -> plain.Tree:
        strategy = {key: value for key, value in self.strategy.resolved().items() if key != "name"}
        engine = {field.name: getattr(self._engine, field.name) for field in fields(self._engine)}
        return {**strategy, "engine": {**engine, "cuts": list(self._engine.cuts or ())}}

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        parameters: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        for stage in self.stages:
            parameters |= {_full(name): p.detach() for name, p in stage.module.named_parameters()}
            buffers |= {_full(name): buffer for name, buffer in stage.module.named_buffers()}
        return {"parameters": parameters, "buffers": buffers}

    def state_dict(self) -> plain.Tree:
        return {
            "model": self.tensors(),
            "optimizer": self.optimizer.state_dict(),
            "pipeline": {
                "batches": self._runner.batches,
                "stages": {stage.place.stage: stage.state_dict() for stage in self.stages},
            },
        }

    def enter_phase_of(self, step: int) -> None:
        self.settle()
        for session in self._sessions:
            session.enter_phase_of(step)

    @torch.no_grad()
    def load_state(self, file: StateFile) -> None:
        state = file.read("pipeline")
        for kind, tensors in self.tensors().items():
            for name, tensor in tensors.items():
                tensor.copy_(file.tensor(f"model/{kind}/{name}"))
        load_into(self.optimizer, file.read("optimizer"), f"{file.path}: optimizer")
        self._runner.batches = state["batches"]
        for session in self._sessions:
            session.step = file.read("session")["step"]  # of their periods: it was drained
            session.skipped_steps = self.skipped_steps
        for stage in self.stages:
            stage.load_state_dict(state["stages"][stage.place.stage], str(file.path))

    def load_mean(self, files: Sequence[StateFile]) -> None:
        raise CheckpointError(
            f"{files[0].path.parent} was not saved by {self.size} ranks, and a pipeline continues only with "
            "the same number of ranks. Start from the saved run's model.safetensors instead"
        )

    # ---- closing -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Drain the pipeline and take the hooks off; collective. The model is whole on every rank afterwards."""
        if self.state.ended:
            return
        self.stop_saving(together=True)
        self.settle()
        self.state.move("close")
        self._absent.close()
        for session in self._sessions:
            session.close()
        for lane in (*self._lanes, self._norms, self.control):
            lane.close()
        self.note_counts(self.model)
        self._observer.close()
        self.give_back()

    def abandon(self) -> None:
        self.state.move("abandon")
        self.stop_saving(together=False)
        self.note_counts(self.model)
        for session in self._sessions:
            session.abandon()
        self._observer.abandon()


def _group(peer: Peer, ranks: Sequence[int]) -> Peer:
    """Return this rank's endpoint among `ranks`, which include it; collective."""
    group = peer.group(ranks)
    assert group is not None
    return group


def _full(name: str) -> str:
    """Return the model's name of something from its name in a stage's module."""
    return name.replace("/", ".")
