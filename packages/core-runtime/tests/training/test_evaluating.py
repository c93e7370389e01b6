"""How often a run evaluates changes nothing of what it trains, with delays too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hocket.cli.main import main

LATE = ("parameters.0.delay=1", "parameters.0.merge=add")


@pytest.mark.parametrize("recipe", [("overlap_sgp",), ("dpsgd", *(f"strategy.{each}" for each in LATE))])
def test_the_same_model(recipe: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = []
    for eval_every in ("null", "1", "5"):
        out = tmp_path / eval_every
        fixed = (
            "-n",
            "2",
            "--transport",
            "virtual",
            "-q",
            "task=digits",
            "steps=12",
            f"eval_every={eval_every}",
        )
        monkeypatch.setattr(sys, "argv", ["hocket", "run", *recipe, *fixed, "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        models.append(load_file(out / "model.safetensors"))
    rarely, *others = models
    for often in others:
        assert all(torch.equal(rarely[name], often[name]) for name in rarely)
