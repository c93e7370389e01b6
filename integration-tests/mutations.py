"""Breaks things on purpose, one at a time, and says which test catches each.

    python integration-tests/mutations.py [--only WORD ...] [--check]

Each mutation is a piece of text in one source file that is replaced, in a copy of the repository's last commit, and
the tests that should fail then; a line says of each the first test that failed. `--check` only looks whether each text
is still found exactly once. Exits with 1 where a mutation is not found, its tests did not run, or none catches it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = "packages/core-runtime/src/hocket"
TESTS = "packages/core-runtime/tests"
CELLS = ("integration-tests/test_cells.py", "-k")
RECIPES = ("integration-tests/test_recipes.py", "-k")
ISLANDS = ("integration-tests/test_islands.py", "-k")
RUNS = ("integration-tests/test_island_runs.py", "-k")


@dataclass(frozen=True)
class Mutation:
    """A mistake that somebody could make.

    Attributes:
        what: in words.
        file: where, below the root.
        old: text that stands there once.
        new: what replaces it.
        tests: arguments of pytest.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _core(what: str, file: str, old: str, new: str, *tests: str) -> Mutation:
    return Mutation(what, f"{CORE}/{file}", old, new, tests)


MUTATIONS = [
    _core("a sign in a mixing weight", "topology/plain.py",
          "reversed(others)),\n            self_weight=weight", "reversed(others)),\n            self_weight=-weight",
          f"{TESTS}/topology"),
    _core("a weight that does not sum to 1", "topology/plain.py", "1 / (len(hops) + 1)", "1 / (len(hops) + 2)",
          f"{TESTS}/topology"),
    _core("an off-by-one in a round of the exponential graph", "topology/plain.py", "round % num_hops]",
          "(round + 1) % num_hops]", f"{TESTS}/topology"),
    _core("the mean of the wrong number of ranks", "topology/plain.py", "self_weight=1 / size",
          "self_weight=1 / (size + 1)", f"{TESTS}/topology"),
    Mutation("an off-by-one in a hypercube's round", "packages/gossipgrad/src/hocket_gossipgrad/hypercube.py",
             "rank ^ 1 << round %", "rank ^ 1 << (round + 1) %", ("packages/gossipgrad/tests/test_topologies.py",)),
    Mutation("a shuffle that comes from the wrong neighbour",
             "packages/gossipgrad/src/hocket_gossipgrad/ring_stream.py", "(rank - hops) % size", "(rank + hops) % size",
             ("packages/gossipgrad/tests/test_ring_shuffle.py",)),
    Mutation("a draw that all segments share", "packages/crossover/src/hocket_crossover/unfair.py",
             "[segment % (size - 1)]", "[0]", ("packages/crossover/tests",)),
    _core("a lost residual", "compressor/error_feedback.py",
          "torch.add(data, state.residual, alpha=self.decay, out=state.residual)",
          "state.residual.copy_(data)",
          *CELLS, "gradients-sparse_allreduce-error_feedback or gradients-gossip-error_feedback"),
    _core("a residual that is sent twice", "compressor/error_feedback.py",
          "self.compressor.accumulate(message, -1.0, carrier.outgoing)", "pass", f"{TESTS}/compressor"),
    _core("error feedback within error feedback let through", "compressor/error_feedback.py",
          "if self.compressor.traits.keeps_residual:", "if False:", f"{TESTS}/compressor", f"{TESTS}/strategy"),
    _core("the smallest values in place of the largest", "compressor/topk.py", "sizes = np.abs(array)",
          "sizes = -np.abs(array)", f"{TESTS}/compressor/test_selection.py"),
    Mutation("a selection without the threshold itself", "packages/redsync/src/hocket_redsync/selection.py",
             "keys, k))\n    chosen = np.flatnonzero(keys >= floor)",
             "keys, k))\n    chosen = np.flatnonzero(keys > floor)", ("packages/redsync/tests/test_selection.py",)),
    _core("a wait without a timeout", "transport/waiting.py", "if waited_s >= timeout_s:", "if False:",
          f"{TESTS}/transport/test_waiting.py", "--timeout=20"),
    _core("an overlap before the last exchange let through", "strategy/rules/of_slots.py",
          "strategy.parameters[:-1]:", "strategy.parameters[:0]:", f"{TESTS}/strategy"),
    _core("leaders that nobody hears let through", "strategy/rules/of_slots.py", "if not heard:", "if False:",
          f"{TESTS}/strategy", "integration-tests/test_refusals.py"),
    _core("push-sum beside another exchange let through", "strategy/rules/of_slots.py",
          "exchange.carries_weight and len(strategy.parameters) > 1", "False", f"{TESTS}/strategy"),
    _core("gradients that are not averaged", "session/exchange/segment_state.py",
          "torch.mul(given, self.state.scale, out=self.outgoing)",
          "self.outgoing.copy_(given)", f"{TESTS}/session", "-m", "not mpi"),
    _core("gradients of 16 bits that are not averaged", "session/exchange/segment_state.py",
          "self.outgoing.copy_(given).mul_(self.state.scale)", "self.outgoing.copy_(given)",
          f"{TESTS}/session/test_replicas.py"),
    _core("push-sum's values not multiplied by their weight", "session/exchange/push_sum.py",
          "target.mul_(self.weights[index])", "pass", f"{TESTS}/session/test_push_sum.py"),
    _core("a consensus that is a sum", "session/save/set_to_mean.py", "total.div_(lane.size)", "total.div_(1)",
          f"{TESTS}/session", "-m", "not mpi"),
    _core("files of a checkpoint whose size is not looked at", "checkpoint/manifest.py",
          "found = _size_of(path)", "found = size",
          f"{TESTS}/checkpoint", "-m", "not mpi"),
    _core("a period that is one too long", "strategy/exchange.py", "        return self.every\n",
          "        return self.every + 1\n", *RECIPES, "periodic or local"),
    _core("replicas that are believed to be equal", "session/exchange/equal_replicas.py",
          "        if not apart:\n", "        if True:\n", f"{TESTS}/session/test_equal_replicas.py"),
    _core("replicas that are never looked at in training", "session/exchange/equal_replicas.py",
          "self._found = any(", "self._found = False and any(", f"{TESTS}/session/test_equal_replicas.py"),
    _core("replicas that differ, and are left so", "session/exchange/equal_replicas.py",
          "            average(numbers, self._replica.lane)\n", "            pass\n",
          f"{TESTS}/session/test_equal_replicas.py"),
    _core("a round that begins without the others' answers", "session/exchange/equal_replicas.py",
          "        if self._rounds >= self._next:\n            self._ask()\n            self._read_comparison()\n"
          "        self._rounds",
          "        self._read_comparison()\n        self._rounds",
          f"{TESTS}/session/test_equal_replicas.py", "--timeout=60"),
    _core("strides that ranks do not compare", "session/attach.py", "_description(p) + _order(p)", "_description(p)",
          f"{TESTS}/session/test_memory_format.py"),
    _core("residuals that are loaded into another order", "session/save/exchange_state.py",
          'if pending or flatten(state["channel"])[1]:', "if False:",
          f"{TESTS}/session/test_memory_format.py"),
    _core("a step within backward let through", "session/step/optimizers.py",
          "if current_backward() >= 0:", "if False:",
          f"{TESTS}/session/test_within_backward.py"),
    _core("DistributedDataParallel around a session's model let through", "session/ddp.py",
          "if ranks > 1 and not between:", "if False:", f"{TESTS}/session/test_within_backward.py"),
    _core("a module within FSDP let through", "session/refusals.py", "if is_sharded_by_fsdp(parameter):",
          "if False:", f"{TESTS}/session/test_within_backward.py"),
    _core("a look that merges what is under way", "session/exchange/under_way.py",
          "[] if are_open else [_keep(mix) for mix in delayed]", "[]", f"{TESTS}/session/test_looking.py"),
    _core("a look that uses up what was sent", "session/exchange/under_way.py",
          "                segment.outgoing.copy_(outgoing)\n", "", f"{TESTS}/session/test_looking.py"),
    _core("a mean of what is no statistic", "plan/buffers.py", 'name.rpartition(".")[2] in RUNNING or', "True or",
          f"{TESTS}/session/test_statistics.py"),
    _core("statistics that count no samples", "session/save/untrained.py",
          "set_to_mean(tensor, self.places.control, self.share)", "set_to_mean(tensor, self.places.control)",
          f"{TESTS}/session/test_statistics.py"),
    _core("frozen parameters that a consensus leaves apart", "session/save/untrained.py",
          "for name in means if name in frozen]", "for name in means if False]",
          f"{TESTS}/session/test_statistics.py"),
    _core("equal statistics that are averaged", "session/exchange/buffers.py",
          "(contents[:, number] != contents[0, number]).any()", "True", f"{TESTS}/session/test_statistics.py"),
    _core("a changed bit that nobody looks for", "checkpoint/files.py", "if found != expected:", "if False:",
          f"{TESTS}/checkpoint/test_mistakes.py", "-k", "damage or changed_bit"),
    _core("an optimizer's state in the dtype of its parameters", "session/step/loaded_state.py",
          "if loaded.dtype == saved.dtype or", "if True or", f"{TESTS}/checkpoint/test_what_programs_hold.py"),
    _core("modules' extra state that is not loaded", "session/save/replica_state.py",
          'load_extra_states(self.model, modules["extra"], where)', "pass",
          f"{TESTS}/checkpoint/test_what_programs_hold.py"),
    _core("buffers that keep the shape of a new model", "session/save/module_state.py",
          "mine is None or mine.shape != saved.shape:", "False:", f"{TESTS}/checkpoint/test_what_programs_hold.py"),
    _core("steps that begin anew with a session", "session/save/reattached.py", "= steps, passes", "= 0, 0",
          f"{TESTS}/session/test_again.py"),
    _core("a step by which torch makes a state", "session/torch_internals.py",
          "elif frame.f_code is code:", "elif False:",
          f"{TESTS}/session/test_again.py", "-k", "torch_makes"),
    _core("weights that were set aside, and are not set back", "segment/storage.py",
          "                    bound.parameter.data = value", "                    pass",
          f"{TESTS}/session/test_held_memory.py"),
    _core("gradients that a script keeps, overwritten", "session/exchange/segment_state.py",
          "getrefcount(gradient.result) > _RESULT_REFERENCES", "False", f"{TESTS}/session/test_held_memory.py"),
    _core("parameters that stay views of one buffer", "segment/storage.py",
          "bound.view.clone(memory_format=torch.preserve_format)", "bound.view",
          f"{TESTS}/session/test_held_memory.py"),
    _core("NaN that a rank alone does not leave out", "session/step/nonfinite.py", "elif alone or self._may_skip:",
          "elif alone:", f"{TESTS}/session/test_branches.py"),
    _core("an inner accumulation that ends the outer one", "session/step/state.py",
          "self.accumulating = before", "self.accumulating = False",
          f"{TESTS}/session/test_branches.py"),
    _core("a batch that is left out, and counts", "session/step/weights.py", "        self._weights[-1] = 0.0\n", "",
          f"{TESTS}/session/test_left_out_batches.py"),
    _core("samples of batches that were left out", "session/step/weights.py",
          "        self.total = self._total_before\n", "",
          f"{TESTS}/session/test_counted_batches.py"),
    _core("batches beyond a loader's length that are dropped", "session/data/session_data.py",
          "if not self._session.epochs.goes_on(peer, current):", "if True:", f"{TESTS}/session/test_lengths.py"),
    _core("an evaluation that trains", "session/step/other_sessions.py",
          "return not (model.training and torch.is_grad_enabled())", "return False",
          f"{TESTS}/session/test_branches.py"),
    _core("an evaluation that takes a resumed training's place", "session/data/epochs.py",
          "if (evaluates and not", "if (False and not", f"{TESTS}/session/test_resumed_evaluations.py"),
    _core("a save within an evaluation that makes it a training", "session/stepping_session.py",
          "        if self.looked_on:\n",
          "        if self.looked_on:\n            self._unopened = None\n",
          f"{TESTS}/session/test_resumed_evaluations.py"),
    _core("a step with a scaler of what holds an optimizer, not counted", "session/step/optimizers.py",
          "for each in _with_inner(optimizer) if each in", "for each in [optimizer] if each in",
          f"{TESTS}/session/test_protocols.py"),
    _core("an optimizer that only holds one, attached by itself", "session/step/optimizers.py",
          "            return stepped_by(value)\n", "            return optimizer\n",
          f"{TESTS}/session/test_protocols.py"),
    _core("a later hook that finds no gradient", "session/step/gradients.py",
          "if self._hooks.held and gradient in self._hooks.held:", "if False:",
          f"{TESTS}/session/test_protocols.py"),
    _core("copies of weights that nobody tells of", "session/step/own_copies.py", "cosine > _SMALLEST_COSINE",
          "cosine > 2", f"{TESTS}/session/test_own_copies.py"),
    _core("moments that are taken for copies of weights", "session/step/own_copies.py", "return bool(cosine",
          "return True or bool(cosine", f"{TESTS}/session/test_own_copies.py"),
    _core("gradients that only some steps drop, without a word", "session/step/unused.py",
          "if self._always is False and",
          "if self._always is True and", f"{TESTS}/session/test_unused.py"),
    _core("gradients of a GAN's other half taken for dropped ones", "session/step/other_sessions.py",
          "return backward >= 0 and", "return False and", f"{TESTS}/session/test_unused.py"),
    _core("a forward that begins unnoticed", "session/exchange/forward.py",
          "        if self._exchange.due:\n            self._merge",
          "        if False:\n            self._merge", f"{TESTS}/session/test_forward_noticed.py"),
    _core("a state that goes back to an earlier round", "session/step/account.py", "kept.forget()", "pass",
          f"{TESTS}/session/test_account.py", "-k", "first_drop"),
    _core("a rank that is gone, unnoticed", "launch/absent.py", "rank not in self._found]", "False]",
          f"{TESTS}/endings/test_absent.py", "-k", "looks"),
    _core("a rank of another job taken for one's own", "launch/absent.py", "own and self._job <= variables",
          "own", f"{TESTS}/endings/test_absent.py", "-k", "another_job"),
    _core("a signal to one rank that the others do not hear", "session/save/save_point.py",
          "return any(point.session.peer.status.is_asked_to_end() for", "return any(False for",
          f"{TESTS}/endings/test_preemption.py", "-k", "only_some"),
    _core("another job's ranks taken into one's own", "transport/meeting/attempt.py",
          "member[:2] != first[:2]]", "False]", f"{TESTS}/transport/test_attempt.py"),
    _core("a folder that is not shared, unnoticed", "checkpoint/shared.py", "    if not blind:", "    if True:",
          f"{TESTS}/checkpoint/test_shared.py"),
    _core("copies that are not made", "checkpoint/host_copies.py",
          "own.copy_(part, non_blocking=part.device.type == \"cuda\")", "pass",
          f"{TESTS}/checkpoint/test_beside_training.py", "-k", "what_is_written"),
    _core("a thread that cannot write, unheard", "checkpoint/on_threads.py",
          "json.dumps({\"error\": in_words(error)[:_ERROR_CHARACTERS]})", "json.dumps({\"result\": None})",
          f"{TESTS}/checkpoint/test_beside_training.py", "-k", "raised_by_all"),
    _core("older checkpoints that go before all hosts have the newest", "session/save/saving.py",
          "session.saved = folders.finish(path, number)",
          "folders.keep_newest(path.parent, 0, manifest.run); session.saved = folders.finish(path, number)",
          f"{TESTS}/checkpoint/test_kill.py", "-k", "disk_of_its_own"),
    _core("files that come late, called missing", "checkpoint/shared.py", "if time.monotonic() > end_s:", "if True:",
          f"{TESTS}/checkpoint/test_shared.py"),
    _core("requests that are kept for ever", "session/exchange/active.py",
          "self._note_end(self._under_way.pop(request), error)", "self._note_end(self._under_way[request], error)",
          f"{TESTS}/session/test_active.py"),
    _core("requests that are done, and looked at for ever", "session/exchange/active.py",
          "        if over:\n            self._end(request)", "", f"{TESTS}/session/test_active.py"),
    _core("gatherings that other waits do not advance", "transport/mpi/lane.py",
          "        self.peer.progress.add(advance)\n", "", f"{TESTS}/transport/test_mpi.py", "-k", "two_lanes"),
    _core("what follows a request and fails, said to the first who asks alone", "transport/request.py",
          "self._held, self._act = held, partial(_fail, error)", "pass", f"{TESTS}/transport/test_requests.py"),
    _core("others' files that are replaced", "own_files.py", "if name not in own and _holds(folder / name)]",
          "if False]", f"{TESTS}/training/test_own_files.py"),
    _core("a configuration whose end nobody looks for", "results/kept_config.py",
          'if text.rstrip().rpartition("\\n")[2] != _END:', "if False:", f"{TESTS}/training/test_damaged_results.py"),
    _core("infinities that are no JSON", "strict_json.py", "if math.isfinite(value)", "if not math.isnan(value)",
          f"{TESTS}/training/test_strict_json.py"),
    _core("a changed configuration that is resumed", "results/kept_config.py",
          "if not texts or text_of_config(config) in texts:", "if True:", f"{TESTS}/training/test_damaged_results.py",
          "-k", "changed"),
    _core("a plugin that ends the process", "plugin/discovery.py", "except (Exception, SystemExit) as error:",
          "except Exception as error:", f"{TESTS}/plugin/test_damaged.py"),
    _core("aliases that multiply", "config/source.py", "if sizes[id(node)] > _MOST_VALUES:", "if False:",
          f"{TESTS}/config/test_hostile_yaml.py", "--timeout=20"),
    _core("a full disk that names no file", "disk.py", "raise WriteError(f\"{error.filename or path}",
          "raise WriteError(f\"{error.filename}", f"{TESTS}/training/test_full_disks.py"),
    _core("segments that begin when they are ready, on lanes with one order", "session/step/gradients.py",
          "        if self._ordered:\n            self._send", "        if False:\n            self._send",
          "integration-tests/test_order_on_devices.py", "-k", "sgd and 4"),
    _core("exchanges that go on as soon as they can, on lanes with one order", "session/step/gradients.py",
          "if len(self._exchanges) > 1 and not self._ordered:", "if len(self._exchanges) > 1:",
          "integration-tests/test_order_on_devices.py", "-k", "hierarchical and 4"),
    _core("weights that a program has written, of which only its own rank hears", "session/exchange/phases.py",
          "        if call and self.left.matters:", "        if False:",
          f"{TESTS}/session/test_written.py", "-k", "one_rank_alone_loads"),
    Mutation("averagings that one end alone counts", "packages/adpsgd/src/hocket_adpsgd/pairing.py",
             "            self._partners.append(partner)\n", "            pass\n",
             ("packages/adpsgd/tests/test_sessions.py", "-k", "both_ends")),
    Mutation("a pipeline clipped by each rank's own norm", "packages/eapipe/src/hocket_eapipe/clipping.py",
             "math.sqrt(total[0])", "math.sqrt(squares[0])", ("packages/eapipe/tests/test_accumulation.py",)),
    Mutation("a pipeline's stages that count anew", "packages/eapipe/src/hocket_eapipe/session.py",
             "        self.note_counts(module)\n", "", ("packages/eapipe/tests/test_again.py",)),
    _core("workers that draw alike on all ranks", "task/loading.py", '"workers", self._seed, epoch, rank)',
          '"workers", self._seed, epoch, 0)', f"{TESTS}/task/test_loading.py", "-k", "workers_of_unlike"),
    _core("a look at the first batch that counts as a pass", "session/data/epochs.py", "if early and unused and",
          "if False and", f"{TESTS}/session/test_resumed_evaluations.py"),
    _core("a pass of one batch that does not count", "session/data/epochs.py", "if early and unused and",
          "if early and", f"{TESTS}/session/test_resumed_evaluations.py"),
    _core("Subsets that are not compared", "task/loading.py", "facts |= self._facts", "pass",
          f"{TESTS}/task/test_loading.py"),
    _core("a sample that is compared though it is drawn anew", "task/indices.py",
          "marks.pop() if len(marks) == 1 else None", "marks.pop()", f"{TESTS}/task/test_loading.py"),
    _core("a process group of torch's that is not looked for", "launch/joining.py",
          "if found is None and (group :=", "if found and (group :=", f"{TESTS}/launched/test_spawned.py"),
    _core("a resumed pass in another order", "session/data/loader.py", "        randomness.write(self._start)\n", "",
          f"{TESTS}/checkpoint/test_resume.py", "-k", "test_loaders"),
    _core("zeros that are divided by", "compressor/local_clipping.py", "(norm / scale + 1e-6)", "(norm / scale)",
          f"{TESTS}/compressor/test_conformance.py", "-k", "smallest"),
    _core("tokens that do not count", "session/step/weights.py", "sum(self._weights) / len(self._weights)", "1.0",
          f"{TESTS}/session/test_tokens_and_scalers.py"),
    _core("contributions that depend on a scaler", "session/step/gradients.py", "self._factor / loss_scale)",
          "self._factor)", f"{TESTS}/session/test_tokens_and_scalers.py"),
    _core("a consensus that leaves gathered parameters", "session/replica_session.py",
          "                        self.storage.forget_gathered()\n", "                        pass\n",
          *ISLANDS, "as_whole and AdamW"),
    _core("a merge under gathered parameters", "segment/shard_storage.py",
          "        if take_values:\n            self.forget_gathered()\n", "", *ISLANDS, "alone"),
    _core("layers of shards that are unfrozen", "session/exchange/active_phase.py",
          "or self._replica.ranks.island.gathers:", "or False:", *ISLANDS, "refused"),
    _core("partial sums taken for gradients", "segment/shards.py",
          "if given.placements != self.whole.placements:", "if False:", *ISLANDS, "as_whole and sequence"),
    _core("an island's batches that count alike", "session/step/island_weights.py",
          "return output if own == 1.0 else _weighed(output, own)", "return output", *ISLANDS, "as_whole and uneven"),
    _core("parts that two ranks hold, counted twice", "session/island.py", "return self.size // parts", "return 1",
          *ISLANDS, "as_whole and parallel"),
    _core("NaN that only its column hears of", "session/step/gradients.py",
          "self._island.any(any(trailer[NONFINITE] != 0 for trailer in trailers))",
          "any(trailer[NONFINITE] != 0 for trailer in trailers)", *ISLANDS, "alone"),
    _core("NaN that only its shard hears of", "session/step/nonfinite.py", "self._island.any(bool(names))",
          "bool(names)", *ISLANDS, "alone"),
    _core("a shard that rests while others move", "session/exchange/outer.py",
          "moved = self._island.any_of(", "moved = list(", *ISLANDS, "as_whole and rest"),
    _core("shards that torch has moved", "segment/shard_storage.py",
          "bound.parameter.data = local(whole).detach()", "pass", *ISLANDS, "alone"),
    _core("a kept gradient of shards that is overwritten", "segment/shards.py",
          "    made._local_tensor = part\n", "", *ISLANDS, "alone"),
    _core("optimizer state that is loaded as plain shards", "session/step/loaded_state.py",
          "saved = _of_wholes(optimizer, saved)", "pass", *ISLANDS, "checkpoints"),
    _core("the mean of other places' shards", "session/save/checks.py",
          "if saved_place == place]", "if True]", *ISLANDS, "checkpoints"),
    _core("an island that is another mesh's", "session/island.py", "if not set(_ranks_of(mesh)) <= ranks:",
          "if False:", *ISLANDS, "refused"),
    _core("a part of what FSDP gathers around it", "session/island_refusals.py",
          "and module not in within", "and False", *ISLANDS, "refused"),
    _core("islands of other jobs, by their ranks there", "session/island.py",
          "job = peer.rank // distributed.get_world_size()", "job = 0", *ISLANDS, "jobs"),
    _core("an evaluation that an island's rank leaves", "training/evaluation.py",
          "max(len(indices), _BATCH * batches)", "len(indices)", *RUNS, "a_run_of"),
    _core("ranks of one share that evaluate different samples", "training/evaluation.py",
          "mine = range(island.data_rank, count, island.data_size)", "mine = range(session.rank, count, session.size)",
          *RUNS, "tensor_parallel_islands"),
    _core("parameters that tensor parallelism leaves whole, planned as parts", "training/tensor_parallel.py",
          "(run.island.tensor if name in split else 1)", "run.island.tensor", f"{TESTS}/plan/test_islands.py"),
    _core("ranks of one computation that draw differently", "training/loop.py",
          "peer.rank // run.island.tensor", "peer.rank", *RUNS, "tensor_parallel_islands"),
    Mutation("heads of mixed queries, keys and values", "packages/tasks/src/hocket_tasks/heads.py",
             "by_head = joint.view(batch, length, 3, own.num_heads, hidden // own.num_heads)",
             "by_head = joint.view(batch, length, own.num_heads, 3, -1).transpose(2, 3)",
             (*RUNS, "tensor_parallel_islands")),
    _core("replicas that are ranks of islands", "training/summary.py", "if place == 0]", "if True]",
          *RUNS, "a_run_of"),
]  # fmt: skip


def _find(mutation: Mutation, root: Path) -> str | None:
    """Return why a mutation cannot be made, None where it can."""
    path = root / mutation.file
    count = path.read_text().count(mutation.old) if path.exists() else 0
    return None if count == 1 else f"{mutation.file} holds {mutation.old!r} {count} times"


def _caught(mutation: Mutation, root: Path) -> list[str] | None:
    """Make a mutation, run its tests and take it back; return the tests that failed, None where none has run."""
    path = root / mutation.file
    before = path.read_text()
    path.write_text(before.replace(mutation.old, mutation.new))
    sources = [str(folder) for folder in sorted(root.glob("packages/*/src"))]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", *mutation.tests],
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(before)
    if ended.returncode not in (0, 1):  # moved, or left out by their options
        return None
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="words of the mutations that are made")
    parser.add_argument("--check", action="store_true", help="only look whether each text is found once")
    options = parser.parse_args()
    chosen = [m for m in MUTATIONS if not options.only or any(word in m.what for word in options.only)]
    missing = [reason for mutation in chosen if (reason := _find(mutation, ROOT)) is not None]
    print(*missing, sep="\n", end="\n" if missing else "")
    if options.check:
        return bool(missing)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", str(root), "HEAD"], cwd=ROOT, check=True
        )
        try:
            survived = [mutation for mutation in chosen if not _told(mutation, root)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(root)], cwd=ROOT, check=True)
    return bool(missing or survived)


def _told(mutation: Mutation, root: Path) -> bool:
    caught = [] if _find(mutation, root) else _caught(mutation, root)
    failure = "ITS TESTS DID NOT RUN" if caught is None else "NOT CAUGHT"
    print(f"{mutation.what}: {caught[0] if caught else failure}", flush=True)
    return bool(caught)


if __name__ == "__main__":
    sys.exit(main())
