"""HocketTrainer on two ranks, against loops without it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import accelerate_cases
import cases
import pytest
import tiny
from transformers.trainer import TRAINER_STATE_NAME

from hocket.testing.job import Job
from hocket_transformers.trainer import _newest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]


def test_ranks_of_mpiexec_are_named_to_accelerate(job: Job) -> None:
    first, second = job.run(cases.environment, ())
    assert first["variables"] == ["0", "2", "0", "2", "127.0.0.1"]
    assert second["variables"] == ["1", "2", "1", "2", "127.0.0.1"]
    assert (first["args"], second["args"]) == ([0, 2, 0], [1, 2, 1])
    assert first["port"] == second["port"]


@pytest.mark.parametrize(
    ("num", "accumulated", "of_all"), [(40, 1, True), (36, 1, False), (40, 2, True), (36, 2, False)]
)
@pytest.mark.parametrize(
    "strategy", [["sgd"], ["diloco", "parameters.0.every=3"], ["dpsgd"]], ids=lambda s: s[0]
)
def test_weights_are_those_of_a_plain_loop(
    job: Job, strategy: list[str], num: int, accumulated: int, of_all: bool
) -> None:
    """To the bit, with dropout; with a last global batch of half the size, and a last step of fewer batches."""
    for by_trainer, by_loop in job.run(cases.against_a_loop, (strategy, num, accumulated, of_all)):
        assert by_trainer == by_loop


@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_those_of_pytorch_without_hocket(job: Job, fused: bool) -> None:
    """To the bit; the default of `optim` is the fused AdamW, which rounds otherwise than the plain one."""
    expected = {
        each: tiny.without_hocket(tiny.Texts(40, masked=True), 2, fused=each) for each in (False, True)
    }
    assert job.run(cases.against_pytorch, (fused,)) == 2 * [expected[fused]]
    assert expected[False] != expected[True]


def test_ranks_that_exchange_no_gradients_do_not_wait_for_one_anothers_tokens(job: Job) -> None:
    for calls, steps in job.run(cases.calls_to_gather, (["sgd"],)):
        assert calls >= steps > 3
    later, synchronous = ["diloco", "parameters.0.every=3"], ["synchronous_steps=2"]
    [none, _] = job.run(cases.calls_to_gather, (later,))
    [first, _] = job.run(cases.calls_to_gather, ([*later, *synchronous],))
    assert first[0] - none[0] == 2


@pytest.mark.parametrize(("num", "accumulated"), [(40, 1), (33, 1), (33, 2), (41, 2)])
def test_each_token_of_a_step_counts_the_same(job: Job, num: int, accumulated: int) -> None:
    """Also in a last step in which a rank has fewer batches, or none."""
    (first, logged), (second, _) = job.run(cases.against_one_process, (num, accumulated))
    assert first == second
    losses: list[float] = []
    expected = tiny.one_process(tiny.Texts(num, masked=True), 2, accumulated, losses=losses)
    assert logged == pytest.approx(losses, abs=1e-4)
    assert first == pytest.approx(expected, abs=1e-6)
    assert first != pytest.approx(tiny.weights(tiny.model(0.0)), abs=1e-3)


@pytest.mark.parametrize(
    ("strategy", "stop"),
    [
        *((["diloco", "parameters.0.every=3"], stop) for stop in (2, 3, 4)),
        (["redsync", "gradients.0.compressor.correct_momentum=false"], 2),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else None,
)
def test_a_resumed_run_is_the_one_that_was_not_interrupted(
    job: Job, tmp_path: Path, strategy: list[str], stop: int
) -> None:
    """To the bit, with dropout and a collator that draws: within an epoch, at its end (3) and in the next."""
    for rank in job.run(cases.resumed, (str(tmp_path), strategy, False, stop)):
        assert rank["rest"] == rank["whole"]
        assert rank["cut"] != rank["whole"]


def test_a_run_that_saves_beside_training_is_resumed(job: Job, tmp_path: Path) -> None:
    for rank in job.run(cases.resumed, (str(tmp_path), ["diloco", "parameters.0.every=3"], False, 2, False)):
        assert rank["rest"] == rank["whole"]
        assert rank["cut"] != rank["whole"]


def test_ranks_that_are_asked_to_end_save_and_go_on_exactly(job: Job, tmp_path: Path) -> None:
    """The request reaches one rank, which agrees with the other on a step."""
    for rank in job.run(cases.asked_to_end, (str(tmp_path),)):
        assert rank["status"] == 143
        [left] = rank["left"]
        assert int(left.removeprefix("checkpoint-")) >= 4
        assert rank["rest"] == rank["whole"]


def test_a_trainer_that_failed_goes_on_and_trains_once_more(job: Job, tmp_path: Path) -> None:
    """It handles signals while it trains, and only then."""
    first, second = job.run(cases.failed_first, (str(tmp_path),))
    for rank in first, second:
        assert rank["rest"] == rank["whole"]
        # Two steps until it fails, two of three from the checkpoint of the first, and three.
        assert rank["handled"] == [True, True, False, *5 * [True]]
    assert first["again"] == second["again"] != first["rest"]
    assert first["steps"] == 3


def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    for step, name in ((2, "step-00000002"), (4, "step-00000004-abc.unfinished")):
        held = tmp_path / f"checkpoint-{step}" / "hocket" / name
        held.mkdir(parents=True)
        (held / "manifest.json").touch()
        (tmp_path / f"checkpoint-{step}" / TRAINER_STATE_NAME).touch()
    assert _newest(str(tmp_path)) == str(tmp_path / "checkpoint-2")


def test_a_stream_is_resumed(job: Job, tmp_path: Path) -> None:
    for rank in job.run(cases.resumed, (str(tmp_path), ["dpsgd"], True, 2)):
        assert rank["rest"] == rank["whole"]
        assert rank["cut"] != rank["whole"]


def test_evaluation_and_files_are_of_the_replicas_mean(job: Job, tmp_path: Path) -> None:
    first, second = job.run(cases.looked_at, (str(tmp_path),))
    assert first["evaluated"] == second["evaluated"]
    assert first["evaluated"] == pytest.approx(first["by the saved model"], rel=1e-3)
    assert first["trained"] == second["trained"] == first["saved"] == second["saved"]
    assert {"model.safetensors", "config.json", "trainer_state.json", "hocket"} <= set(first["files"])


def test_early_stopping_and_the_best_model(job: Job, tmp_path: Path) -> None:
    first, second = job.run(cases.best, (str(tmp_path),))
    assert first == second
    assert first["trained"] == first["best"]
    assert first["steps"] < 160


@pytest.mark.parametrize(
    "strategy", [["periodic_average", "parameters.0.every=50"], ["diloco"]], ids=lambda s: s[0]
)
def test_callbacks_at_the_end_find_the_mean_and_may_replace_it(job: Job, strategy: list[str]) -> None:
    first, second = job.run(cases.replaced, (strategy,))
    assert first["trained"] != second["trained"]
    assert first["at the end"] == second["at the end"]
    assert not any(first["left"])


def test_steps_rates_and_norms_are_those_of_all_ranks_and_rank_0_logs(job: Job) -> None:
    first, second = job.run(cases.logs, ())
    assert first["norms"] == second["norms"]
    assert first["steps"] == second["steps"] == 10
    assert first["global"] == 8
    assert first["rates"][:4] == second["rates"][:4] == [0.0, 0.005, 0.01, 0.01]
    assert first["seen"] == [10, 11]
    assert second["seen"] == [10, 0]


@pytest.mark.parametrize("kind", ["shuffled", "group_by_length", "stream"])
def test_each_sample_goes_to_one_rank_once_an_epoch(job: Job, kind: str) -> None:
    first, second = job.run(cases.shares, (kind,))
    for epoch in (first[:7], second[:7]), (first[7:14], second[7:14]):
        numbers = sorted(number for rank in epoch for batch in rank for number in batch)
        assert numbers == list(range(50))
    if kind == "group_by_length":
        spread = [max(n % 10 for n in batch) - min(n % 10 for n in batch) for batch in first + second]
        assert sum(spread) / len(spread) < 4  # 6.2 where they are not grouped


def test_autocast_and_gradient_checkpointing(job: Job) -> None:
    first, second = job.run(cases.half_precision, ())
    assert first["trained"] == second["trained"]
    assert first["dtype"] == "torch.float32"
    assert {*first["reentrant"]} == {False}
    assert first["losses"][-1] < first["losses"][0]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_of_lora_the_adapters_alone_are_sent(job: Job, tmp_path: Path) -> None:
    first, second = job.run(cases.adapters, (str(tmp_path),))
    assert first["adapters"] == second["adapters"]
    assert any(first["adapters"])
    assert first["frozen"]
    assert first["sent"] <= 4 * first["numel"] + 1000
    assert "adapter_model.safetensors" in first["files"]


@pytest.mark.parametrize("prepared", [True, False])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loop_of_accelerate_s_exchanges(job: Job, accumulated: int, prepared: bool) -> None:
    """With the model in DistributedDataParallel, as `prepare` returns it, or by itself."""
    first, second = job.run(accelerate_cases.of_accelerate, (["sgd"], accumulated, prepared))
    assert first == second
    assert first == pytest.approx(tiny.one_process(tiny.Texts(48), 2, accumulated, shuffle=False), abs=1e-6)


def test_a_loop_of_accelerate_s_ends_with_the_replicas_mean(job: Job) -> None:
    first, second = job.run(accelerate_cases.of_accelerate, (["diloco", "parameters.0.every=4"], 1, True))
    assert first == second


@pytest.mark.parametrize(
    "strategy",
    [["diloco", "parameters.0.every=4"], ["periodic_average", "parameters.0.every=4"], ["powersgd"]],
    ids=["outer", "averages", "residuals"],
)
def test_a_loop_of_accelerate_s_goes_on_where_it_was(job: Job, tmp_path: Path, strategy: list[str]) -> None:
    """After 6 steps, in the middle of a period; `save_state` writes the replicas' mean as the model."""
    if strategy == ["powersgd"] and importlib.util.find_spec("hocket_powersgd") is None:
        pytest.skip("hocket-powersgd is not installed")
    for rank in job.run(accelerate_cases.kept_by_accelerate, (str(tmp_path), strategy, 6)):
        assert rank["again"] == rank["whole"]
        assert rank["saved"] == rank["mean"]


def test_a_state_that_accelerate_saved_alone_is_loaded_before_exchanging(job: Job, tmp_path: Path) -> None:
    for said in job.run(accelerate_cases.loaded_by_accelerate, (str(tmp_path),)):
        assert said.endswith("which then begins from the loaded model and optimizer")


def test_an_accelerator_that_takes_its_rank_for_the_only_one_is_refused(job: Job) -> None:
    for said in job.run(accelerate_cases.alone_by_accelerate, ()):
        assert said.startswith("Accelerate found 1 ranks, but the launcher started 2: ")
        assert said.endswith("write Accelerator(cpu=True)")


def test_the_folder_of_a_run_has_what_trainer_logs(job: Job, tmp_path: Path) -> None:
    evaluated, _ = job.run(cases.written, (str(tmp_path / "a"),))
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    assert found == [tuple(each) for each in evaluated]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5]
    assert not any(name.endswith("_per_second") for row in rows for name in row)


def test_a_step_outside_of_trainer_s_loop_is_refused(job: Job) -> None:
    for refused in job.run(cases.outside_of_train, ()):
        assert len(refused) == 2
        assert all("exchanges only within Trainer's own train()" in each for each in refused)


def test_accelerate_saves_all_weights_of_an_attached_model(job: Job, tmp_path: Path) -> None:
    for attached, saved in job.run(accelerate_cases.saved_without_exchanging, (str(tmp_path),)):
        assert saved == attached
