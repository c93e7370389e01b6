"""Each test writes a module of its own name, so that none finds what another has imported."""

from __future__ import annotations

import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hocket.errors import ConfigError
from hocket.task import Digits, Task, load_user_task

TASK = """
    from dataclasses import dataclass

    import torch

    from hocket.task import Task, TaskData, TensorSamples


    @dataclass(frozen=True)
    class Line(Task):
        slope: float = 2.0
        num_samples: int = 8

        def __post_init__(self):
            if self.num_samples < 1:
                raise ValueError(f"num_samples is {self.num_samples}; allowed: 1 or more")

        def data(self, seed):
            inputs = torch.arange(float(self.num_samples)).unsqueeze(1)
            samples = TensorSamples(inputs, inputs * self.slope)
            return TaskData(train=samples, valid=samples)

        def model(self):
            return torch.nn.Linear(1, 1)

        def loss(self, output, target):
            return torch.nn.functional.mse_loss(output, target)
"""


#: Writes a module, of a name and with a source.
Write = Callable[[str, str], None]

PLAIN = """
    from hocket.task import Task


    class Plain(Task):
        def data(self, seed): ...
        def model(self): ...
        def loss(self, output, target): ...
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes a module into the current directory; its import is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write_module(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))

    yield write_module
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_instance_class_and_function_are_tasks(write: Write) -> None:
    write(
        "line_a",
        TASK + "\n    steep = Line(slope=9.0)\n\n\n    def make():\n        return Line(slope=3.0)\n",
    )

    tasks: list[Any] = [load_user_task(f"line_a:{name}") for name in ("steep", "make", "Line")]
    tasks.append(load_user_task("line_a:Line", {"slope": 4.0, "num_samples": 3}))
    assert [task.slope for task in tasks] == [9.0, 3.0, 2.0, 4.0]


def test_regression_needs_no_metrics(write: Write) -> None:
    write("line_b", TASK)
    task = load_user_task("line_b:Line")
    inputs, targets = task.data(seed=0).train[[0, 1, 2]]

    assert task.metrics(task.model()(inputs), targets) == {}
    assert task.loss(inputs, targets).item() == pytest.approx(5 / 3)


def test_current_directory_comes_first(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "line_c.py").write_text("task = None\n")
    sys.path.insert(0, str(elsewhere))
    write("line_c", TASK)

    assert isinstance(load_user_task("line_c:Line"), Task)
    load_user_task("line_c:Line")
    assert sys.path.count(str(tmp_path)) == 1


def test_module_in_a_package(write: Write, tmp_path: Path) -> None:
    package = tmp_path / "lines_d"
    package.mkdir()
    (package / "__init__.py").touch()
    write("lines_d/line", TASK)

    assert isinstance(load_user_task("lines_d.line:Line"), Task)


def test_installed_module() -> None:
    assert load_user_task("hocket.task:Digits", {"hidden": 16}) == Digits(hidden=16)


def test_subclass_without_dataclass_takes_no_fields(write: Write) -> None:
    write("plain_e", PLAIN)
    assert isinstance(load_user_task("plain_e:Plain"), Task)
    with pytest.raises(ConfigError, match=r"task\.hidden: plain_e:Plain has no fields"):
        load_user_task("plain_e:Plain", {"hidden": 3})


@pytest.mark.parametrize(
    "name", ["digits", "line:", ":task", "my/line.py:task", ".line:task", "line:a.b", "a b:c"]
)
def test_other_forms_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"task\.name is .*'module:attribute'"):
        load_user_task(name)


def test_no_such_module_suggests_a_neighbour(write: Write, tmp_path: Path) -> None:
    write("line_f", TASK)
    with pytest.raises(ConfigError) as caught:
        load_user_task("line_g:Line")
    assert f"no module 'line_g' in {tmp_path}" in str(caught.value)
    assert "Did you mean 'line_f'?" in str(caught.value)


def test_module_in_what_is_no_package(write: Write) -> None:
    write("line_h", TASK)
    with pytest.raises(ConfigError, match=r"no module 'line_h\.sub'"):
        load_user_task("line_h.sub:Line")


@pytest.mark.parametrize(
    ("source", "error", "line"),
    [
        ("import math\n\nvalue = 1 / 0\n", "ZeroDivisionError: division by zero", 3),
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such_module_at_all'", 1),
        ("x = 1\ndef f(:\n", "SyntaxError: invalid syntax", 2),
        ("import json\n\n\njson.loads('{')\n", "JSONDecodeError: Expecting property name", 4),
    ],
    ids=["error", "missing import", "syntax", "error in an installed package"],
)
def test_failing_module_says_error_file_and_line(
    write: Write, tmp_path: Path, source: str, error: str, line: int
) -> None:
    write("broken", source)
    with pytest.raises(ConfigError) as caught:
        load_user_task("broken:task")
    message = str(caught.value)
    assert message.startswith(f"task.name: cannot import module 'broken': {error}")
    assert message.endswith(f"({tmp_path / 'broken.py'}, line {line})")


def test_failing_neighbour_is_where_the_error_is(write: Write, tmp_path: Path) -> None:
    write("neighbour_i", "\n\nraise RuntimeError('not today')\n")
    write("line_i", "import neighbour_i\n")
    with pytest.raises(ConfigError) as caught:
        load_user_task("line_i:task")
    assert f"RuntimeError: not today ({tmp_path / 'neighbour_i.py'}, line 3)" in str(caught.value)


def test_failing_installed_module_is_where_the_error_is(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hocket.task.user.INSTALLED_FOLDERS", (sysconfig.get_path("stdlib"), str(tmp_path)))
    write("installed", "\nraise RuntimeError('not today')\n")
    with pytest.raises(ConfigError) as caught:
        load_user_task("installed:task")
    assert f"RuntimeError: not today ({tmp_path / 'installed.py'}, line 2)" in str(caught.value)


def test_no_such_attribute_suggests_another(write: Write) -> None:
    write("line_j", TASK)
    with pytest.raises(ConfigError, match=r"module 'line_j' .* has no 'Lime'\. Did you mean 'Line'\?"):
        load_user_task("line_j:Lime")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("task = 3", "wrong:task is of type int; allowed: a hocket.task.Task, a subclass"),
        ("class task: pass", "wrong:task is the class task; allowed"),
        ("def task(): return 3", "wrong:task returned of type int; allowed"),
        ("def task(size): return 3", "wrong:task must be callable without arguments: missing a required arg"),
        ("def task(): return {}['key']", r"wrong:task failed: KeyError: 'key' \(.*wrong.py, line 1\)"),
        ("from hocket.task import Task as task", "wrong:task does not define data, loss, model"),
    ],
)
def test_what_is_no_task_is_refused(write: Write, source: str, message: str) -> None:
    write("wrong", source + "\n")
    with pytest.raises(ConfigError, match=f"task.name: {message}"):
        load_user_task("wrong:task")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"slop": 1.0},
            r"task\.slop: no such field of .*\. Did you mean 'slope'\? Allowed: slope, num_samples",
        ),
        ({"num_samples": "many"}, r"^task\.num_samples: .*'many'.*Integer$"),
        ({"num_samples": 0}, r"num_samples is 0; allowed: 1 or more"),
    ],
)
def test_fields_are_checked(write: Write, fields: dict[str, Any], message: str) -> None:
    write("line_k", TASK)
    with pytest.raises(ConfigError, match=message):
        load_user_task("line_k:Line", fields)


def test_a_classification_with_a_model_of_its_own_has_no_network(write: Write) -> None:
    write(
        "own",
        """
        from dataclasses import dataclass
        from torch import nn
        from hocket.api import Classification

        @dataclass(frozen=True)
        class Own(Classification):
            width: int = 3
            def data(self, seed): raise NotImplementedError
            def model(self): return nn.Linear(self.width, 2)
        """,
    )
    assert load_user_task("own:Own", {"width": 5}).model().in_features == 5
    with pytest.raises(
        ConfigError, match=r"task\.network: no such field .*; allowed: label_smoothing, width"
    ):
        load_user_task("own:Own", {"network": "cnn"})


def test_only_a_class_takes_fields(write: Write) -> None:
    write("line_l", TASK + "\n    steep = Line(slope=9.0)\n")
    with pytest.raises(
        ConfigError, match=r"task\.slope: only a subclass of Task can have fields, and line_l:steep"
    ):
        load_user_task("line_l:steep", {"slope": 1.0})
