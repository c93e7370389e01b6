"""Arguments that do not work with Hocket are refused before anything is trained; one rank trains alone."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from torch.utils.data import DataLoader, RandomSampler
from transformers import TrainingArguments

from hocket.errors import ConfigError, UserError
from hocket_transformers import HocketTrainer, exchanging
from hocket_transformers.samples import shared_out
from hocket_transformers.trainer import _REFUSED, _newest


def arguments(folder: Path) -> Any:
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])


@pytest.mark.parametrize("name", [*_REFUSED, "split_batches"])
def test_arguments_without_a_place_are_refused_by_name(tmp_path: Path, name: str) -> None:
    args = arguments(tmp_path)
    if name == "split_batches":
        args.accelerator_config.split_batches = True
    else:
        setattr(args, name, "given")
    with pytest.raises(
        UserError, match=rf"TrainingArguments\(.*{name}.* does not work with Hocket: .*[:.] \w+"
    ):
        HocketTrainer(tiny.model(), args, hocket="sgd")


def test_a_recipe_that_is_misspelt_is_refused_first() -> None:
    with pytest.raises(ConfigError, match="diloco"):
        HocketTrainer(tiny.model(), SimpleNamespace(), hocket="dilocco")
    with pytest.raises(ConfigError, match="every"):
        HocketTrainer(tiny.model(), SimpleNamespace(), hocket=["diloco", "parameters.0.evry=3"])


def test_an_accelerator_that_shards_is_refused() -> None:
    sharding: Any = SimpleNamespace(distributed_type=SimpleNamespace(name="FSDP"))
    with (
        pytest.raises(UserError, match=r"FSDP.*Hocket exchanges whole models"),
        exchanging(sharding, tiny.model(), None, "sgd"),  # type: ignore[arg-type]
    ):
        pass


def test_arguments_that_were_made_before_the_import_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.join", lambda: SimpleNamespace(size=4))
    with pytest.raises(
        UserError, match="Accelerate found 1 ranks, but the launcher started 4: import hocket_tr"
    ):
        HocketTrainer(tiny.model(), arguments(tmp_path), hocket="sgd")


def test_one_rank_trains_alone_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = tiny.trainer(
        tmp_path, tiny.Texts(33, masked=True), "sgd", dropout=0.0, optim="sgd", max_grad_norm=0.0
    )
    with caplog.at_level(logging.WARNING, "hocket"):
        made.train()
    assert "one rank trains alone" in caplog.text
    assert tiny.weights(made.model) == pytest.approx(
        tiny.one_process(tiny.Texts(33, masked=True), 1, 1), abs=1e-6
    )


def test_the_newest_checkpoint_that_was_not_cut_off_is_resumed(tmp_path: Path) -> None:
    for name in ("checkpoint-5", "checkpoint-40", "checkpoint-100", "checkpoint-x"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-5", "checkpoint-40", "checkpoint-x"):
        (tmp_path / name / "trainer_state.json").touch()
    assert _newest(str(tmp_path)) == str(tmp_path / "checkpoint-40")
    assert _newest(str(tmp_path / "checkpoint-5")) is None


def test_a_checkpoint_without_the_session_s_state_is_refused(tmp_path: Path) -> None:
    made = tiny.trainer(tmp_path, tiny.Texts(16), "sgd", save_strategy="epoch", save_only_model=True)
    made.train()
    again = tiny.trainer(tmp_path, tiny.Texts(16), "sgd", num_train_epochs=2)
    with pytest.raises(UserError, match="checkpoint-4 has no folder hocket"):
        again.train(resume_from_checkpoint=True)


def test_an_order_of_the_user_s_own_is_kept() -> None:
    texts = tiny.Texts(20)
    batches = [[0, 5], [7, 2], [9]]
    own = shared_out(DataLoader(texts, batch_sampler=batches), 0)
    assert [batch["input_ids"].tolist() for batch in own] == [texts.tokens[each].tolist() for each in batches]
    few = shared_out(DataLoader(texts, 4, sampler=RandomSampler(texts, num_samples=8)), 0)
    assert len(few) == 2
    in_order = shared_out(DataLoader(texts, 4), 0)
    assert next(iter(in_order))["input_ids"].tolist() == texts.tokens[:4].tolist()
