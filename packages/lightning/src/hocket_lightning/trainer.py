"""The strategy of Lightning's Trainer: `Trainer(strategy=HocketStrategy("diloco", "parameters.0.every=12"))`."""

from __future__ import annotations

import inspect
import logging
import secrets
import shutil
import zlib
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

import hocket
from hocket.api import broadcast_model, messages
from hocket.errors import UserError
from hocket_lightning.ending import SaveAtLast
from hocket_lightning.frameworks import lightning
from hocket_lightning.loaders import EvenBatches
from hocket_lightning.ranks import RanksOfStrategy
from hocket_lightning.rows import RowsOfRun

_log = logging.getLogger("hocket")


class TrainerStrategy(RanksOfStrategy, lightning("pytorch.strategies").ParallelStrategy):  # type: ignore[misc]
    """The exchange of a Hocket strategy between the ranks of a Trainer.

    Args:
        strategy, overrides, blocking_saves, options: as `HocketStrategy`'s.

    Attributes:
        session: Hocket's session while the model trains; else None.
    """

    strategy_name = "hocket"

    def __init__(self, strategy: str, *overrides: str, blocking_saves: bool = True, **options: Any) -> None:
        super().__init__()
        self._join(strategy, overrides, options)
        self._blocking_saves = blocking_saves
        #: Checkpoints that go once the one which is being written is complete.
        self._replaced: list[Any] = []
        self._open = ExitStack()
        #: Holds the replicas' mean in the model, during validation.
        self._mean = ExitStack()
        self._in_mean = False
        self._metrics: list[tuple[Metric, Any, Any]] = []
        self._compared = self._has_ended = False
        self._loaded: Path | None = None
        #: The last state of the model that Lightning was given to save.
        self._given: dict[str, object] | None = None

    # ---- the beginning -----------------------------------------------------------------------------------------

    def model_to_device(self) -> None:
        """Move the model to this rank's device."""
        self.model.to(self.root_device)

    def setup(self, trainer: Any) -> None:
        """Attach the model and its optimizers; where nothing is trained all ranks get rank 0's model; collective.

        Raises:
            UserError: a setting that Hocket cannot carry out.
        """
        if self._layer_sync is not None:
            raise UserError(
                "Trainer(sync_batchnorm=True) makes ranks communicate during forward, which HocketStrategy does not "
                "support: leave it out. HocketStrategy averages BatchNorm's statistics together with the replicas"
            )
        super().setup(trainer)
        self._synchronise_metrics()
        if trainer.state.fn != "fit":
            lane = self._peer.lane("lightning")
            broadcast_model(self.lightning_module, lane)
            lane.close()
            return
        for optimizer in self.optimizers:
            if _may_leave_closure_out(optimizer):
                # Before the session's own hook, which so sees a plain step.
                optimizer.register_step_pre_hook(_run_closure_first)
        self._compared = self._has_ended = False
        self.session = self._open.enter_context(
            hocket.attach(
                self.lightning_module, self.optimizers, self._exchanges, peer=self._peer, **self._options
            )
        )
        if self.session.out is not None:
            self._open.callback(setattr, trainer, "loggers", trainer.loggers)
            trainer.loggers = [*trainer.loggers, RowsOfRun(self.session, trainer.default_root_dir)]
        first = lightning("pytorch.callbacks").LambdaCallback(
            on_train_epoch_start=self._settle, on_train_end=self._end_training
        )
        trainer.callbacks.insert(0, first)
        self._open.callback(trainer.callbacks.remove, first)
        if trainer.checkpoint_callbacks:
            trainer.callbacks.append(last := SaveAtLast(self))
            self._open.callback(trainer.callbacks.remove, last)

    def _synchronise_metrics(self) -> None:
        """Have torchmetrics exchange over Hocket, where they would by torch.distributed, which nobody has set up."""
        for metric in (each for each in self.lightning_module.modules() if isinstance(each, Metric)):
            if metric.dist_sync_fn is None:
                self._metrics.append((metric, metric.dist_sync_fn, metric.distributed_available_fn))
                metric.dist_sync_fn = self.gathered_tensors
                metric.distributed_available_fn = lambda: self._peer.size > 1

    # ---- training ----------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return a loader with as many batches on every rank, if it is one to train with; collective."""
        if not self.lightning_module.trainer.training:
            return dataloader
        try:
            length: int | None = len(dataloader)
        except TypeError:
            length = None
        lengths = set(self.gathered(length, "train_dataloader"))
        if lengths == {length} and length is not None:
            return dataloader
        return EvenBatches(dataloader, self.reduce_boolean_decision)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Warn once where all ranks are given the same samples; close the session before a pass without training."""
        passes = self.lightning_module.trainer.fit_loop
        if self.session is not None and getattr(passes, "_skip_backward", False):
            self._share_replaced()
        if self._compared or self._peer.size == 1:
            return
        self._compared = True
        try:
            mark: int | None = zlib.crc32(messages.pack(batch))
        except UserError:
            mark = None
        if set(self.gathered(mark, "first batch")) == {mark} != {None} and self._peer.rank == 0:
            _log.warning(
                "all %d ranks train on the same batches: let the dataset give each rank its share, "
                "trainer.global_rank of trainer.world_size, or create the loader with hocket.loader(..., split=...)",
                self._peer.size,
            )

    def _settle(self, *_: object) -> None:
        """Merge what is on its way into the trained weights, which other callbacks may average or replace."""
        if self.session is not None:
            self.session.settle()

    def block_backward_sync(self) -> AbstractContextManager[None]:
        """Mark backwards that end no step."""
        return nullcontext() if self.session is None else self.session.accumulate()

    def on_validation_start(self) -> None:
        """Have the model hold the replicas' mean until validation is over; collective."""
        if self.session is not None:
            self._mean.enter_context(self.session.consensus())
            self._in_mean = True

    def on_validation_end(self) -> None:
        """Give each rank its own replica back."""
        self._in_mean = False
        self._mean.close()

    # ---- checkpoints -------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the replicas' mean, in memory of its own; collective."""
        with ExitStack() as mean:
            if self.session is not None and not self._in_mean and not self._has_ended:
                mean.enter_context(self.session.consensus())
            state = super().lightning_module_state_dict()
            self._given = {key: v.clone() if isinstance(v, Tensor) else v for key, v in state.items()}
        if self._has_ended:
            self._share(self._given)
        return self._given

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint of Lightning's on rank 0, and the state of every rank beside it; collective."""
        beside = _beside(filepath)
        token = ""
        given, self._given = self._given, None
        if given is not None and checkpoint["state_dict"] is not given:
            self._share(checkpoint["state_dict"])
        if self.session is not None and "optimizer_states" in checkpoint and beside is not None:
            self.on_validation_end()  # a checkpoint has every rank's own replica, too
            # What is written over is no way back from a kill.
            blocking = self._blocking_saves or Path(filepath).exists()
            token, blocking = self.broadcast((secrets.token_hex(4), blocking))
            checkpoint["hocket"] = token
            self.session.save(beside / token, blocking=blocking, precision=self.precision_plugin)
            self._remove_replaced(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if token and beside is not None and self.is_global_zero:
            for old in (each for each in beside.iterdir() if each.name != token):
                shutil.rmtree(old, ignore_errors=True)

    def save_at_last(self, filepath: str) -> str:
        """Write a checkpoint before the process ends, and return where; collective."""
        self._blocking_saves = True
        self.lightning_module.trainer.save_checkpoint(filepath)
        return filepath

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and what lies beside it, on rank 0; once a newer one is complete."""
        if self.session is not None and not self._blocking_saves:
            self._replaced.append(filepath)
        else:
            self._remove(filepath)

    def _remove_replaced(self, written: Any = None) -> None:
        """Remove the checkpoints that newer ones have replaced, but for one that is written again."""
        replaced, self._replaced = self._replaced, []
        for filepath in replaced:
            if filepath != written:
                self._remove(filepath)

    def _remove(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        beside = _beside(filepath)
        if self.is_global_zero and beside is not None:
            shutil.rmtree(beside, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *given: Any, **named: Any) -> Any:
        """Read a checkpoint of Lightning's, on all ranks."""
        self._loaded = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, *given, **named)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Go on from the state of every rank; from that of rank 0's optimizers where there is no other; collective."""
        place = None if self._loaded is None else self._loaded / str(checkpoint.get("hocket", ""))
        if "hocket" in checkpoint and place is not None and place.exists():
            assert self.session is not None
            self.session.load(place, precision=self.precision_plugin)
            return
        super().load_optimizer_state_dict(checkpoint)
        if self.is_global_zero:
            _log.warning(
                "the folder with each rank's own state is missing next to the checkpoint (%s): copy it there if you "
                "have it. Without it all ranks begin with the mean model and rank 0's optimizer, the state of "
                "exchanges is empty, and steps are counted from 0, so that synchronous_steps apply again",
                self._loaded or "a folder FILE.hocket",
            )

    # ---- the end -----------------------------------------------------------------------------------------------

    def _end_training(self, *_: object) -> None:
        """Give all ranks the replicas' mean, before callbacks save or replace the trained model; collective."""
        if self.session is not None:
            self.session.consensus()
            self._has_ended = True

    def _share_replaced(self) -> None:
        """Give all ranks the mean of weights that a callback has put in place of the trained ones; collective.

        StochasticWeightAveraging puts its average there, and then passes over the samples for BatchNorm's statistics.
        """
        self._share(super().lightning_module_state_dict())
        self.session, self._has_ended = None, True
        self._open.close()
        for optimizer in self.optimizers:
            optimizer.zero_grad()  # Lightning makes one step more, by the gradients of the last

    def _share(self, state: dict[str, object]) -> None:
        """Give all ranks the mean of weights that callbacks have made, each from its own replica's; collective."""
        values = [each for each in state.values() if isinstance(each, Tensor) and each.is_floating_point()]
        if len({*self.gathered(zlib.crc32(messages.pack(values)), "weights")}) > 1:
            for value in values:
                value.copy_(self.reduce(value))

    def on_exception(self, exception: BaseException) -> None:
        """Leave the session, and say why to the ranks that are still in it."""
        self.session, self._has_ended = None, False
        self._replaced.clear()  # the newest may not be complete
        self.on_validation_end()
        self._open.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Give all ranks the replicas' mean, and close the session; collective."""
        if self._has_ended:
            self._share(super().lightning_module_state_dict())
        elif self.session is not None:
            self.on_validation_end()
            self.session.consensus()
        self.session, self._has_ended = None, False
        self._open.close()
        self._remove_replaced()
        for metric, exchange, available in self._metrics:
            metric.dist_sync_fn, metric.distributed_available_fn = exchange, available
        self._metrics.clear()
        super().teardown()


def _beside(filepath: Any) -> Path | None:
    """Return the folder of the ranks' states beside a checkpoint; None if that is not on a disk."""
    return None if "://" in str(filepath) else Path(f"{Path(filepath).resolve()}.hocket")


def _may_leave_closure_out(optimizer: Optimizer) -> bool:
    """Return whether an optimizer of torch's looks at nothing that its closure does, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and closure is not None and closure.default is None


def _run_closure_first(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Run a step's closure, with which Lightning trains on the batch, before the step."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    with torch.enable_grad():
        closure()
    return args[:1], {key: value for key, value in kwargs.items() if key != "closure"}
