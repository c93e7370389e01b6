"""The user's own task or model, named "module:attribute"."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hocket.errors import ConfigError, allowed_words, suggest
from hocket.installing import INSTALLED_FOLDERS
from hocket.plain import Tree, TreeView
from hocket.plugin.discovery import cause_of
from hocket.results import SOURCE
from hocket.session.save.save_point import ENDED_STATUS
from hocket.task.api import Task

# The key that names a task.
_KEY = "task.name"


def load_user_task(name: str, fields: TreeView | None = None) -> Task:
    """Import a module, looked for in the current directory first, and return the task that it holds.

    The current directory stays first in `sys.path`, so that the task can import its neighbours later.

    Args:
        name: "module:attribute"; the attribute is a Task, a subclass of Task or a function that returns a
            Task when called without arguments.
        fields: values of the subclass's fields; checked like any configuration.

    Raises:
        ConfigError: the name has another form; no such module or attribute; the module cannot be imported or
            the function fails (with error, file and line); it is not a task; a field is unknown or has a
            value that is not allowed.
    """
    found = load_user_object(name, _KEY)
    if inspect.isclass(found) and issubclass(found, Task):
        return _construct(found, name, fields or {})
    for key in fields or {}:
        raise ConfigError(f"task.{key}: only a subclass of Task can have fields, and {name} is not one")
    result = call_user_function(found, name, _KEY) if inspect.isroutine(found) else found
    if not isinstance(result, Task):
        what = f"returned {_describe(result)}" if result is not found else f"is {_describe(found)}"
        raise ConfigError(
            f"task.name: {name} {what}; allowed: a hocket.task.Task, a subclass of it, or a function without "
            "arguments that returns a Task"
        )
    return result


def complete_fields(name: str, fields: TreeView) -> Tree:
    """Return all fields of a user's task, with those given and the others' defaults; it is not made.

    Args:
        name: as for `load_user_task`; a task that is no dataclass has the given fields alone.
        fields: values by name.

    Raises:
        ConfigError: as `load_user_task`, but for what making the task would find.
    """
    found = load_user_object(name, _KEY)
    if not (inspect.isclass(found) and is_dataclass(found)):
        return dict(fields)
    config = _merged(found, name, fields)
    try:
        complete: Any = OmegaConf.to_container(config, enum_to_str=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise _of_field(error) from error
    return {key: complete[key] for key in _fields(found)}


def load_user_object(name: str, key: str) -> Any:
    """Import a module, looked for in the current directory first, and return the object "module:attribute".

    Args:
        name: "module:attribute".
        key: the key of the configuration that holds it, for errors.

    Raises:
        ConfigError: the name has another form; no such module or attribute; the module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise ConfigError(f"{key} is {name!r}; to name your own, write 'module:attribute'")
    module = _import(module_name, key)
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        nearby = suggest(attribute, vars(module))
        raise ConfigError(
            f"{key}: module {module.__name__!r} ({module.__file__}) has no {attribute!r}.{nearby}"
        ) from error


def call_user_function(function: Callable[[], Any], name: str, key: str) -> Any:
    """Return the result of a user's function, called without arguments.

    Args:
        function: the user's function.
        name, key: as for `load_user_object`.

    Raises:
        ConfigError: it needs arguments, or fails; says where.
    """
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ConfigError(f"{key}: {name} must be callable without arguments: {error}") from error
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {name} failed: {_locate(error)}") from error


@contextmanager
def exits_refused(task: str, where: str = "") -> Iterator[None]:
    """Refuse an exit by a run's own code: its status 0 would say that the run is complete.

    Args:
        task: the run's task, for the error.
        where: the rank, for the error; empty before ranks have begun.

    Raises:
        ConfigError: the code has called sys.exit; says where.
    """
    try:
        yield
    except SystemExit as error:
        if error.code == ENDED_STATUS:  # ranks that were asked to end have saved
            raise
        raise ConfigError(
            f"task {task}: {_locate(error)}{where} before the run is complete: raise an error that says why"
        ) from error


def _import(module_name: str, key: str) -> ModuleType:
    here = os.getcwd()
    if sys.path[:1] != [here]:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            nearby = suggest(module_name, (path.stem for path in Path(here).glob("*.py")))
            copy = Path(here, SOURCE, *module_name.split("."))
            if copy.with_suffix(".py").is_file() or copy.is_dir():
                nearby = (
                    f" To use the copy of it that this run kept: `cd {SOURCE}`, and write paths as seen from there, "
                    "such as ../config.yaml"
                )
            raise ConfigError(
                f"{key}: no module {module_name!r} in {here} or among the installed packages.{nearby}"
            ) from error
        raise ConfigError(f"{key}: cannot import module {module_name!r}: {_locate(error)}") from error


def _construct(task_class: type[Task], name: str, fields: TreeView) -> Task:
    if inspect.isabstract(task_class):
        missing = ", ".join(sorted(task_class.__abstractmethods__))
        raise ConfigError(f"task.name: {name} does not define {missing}, which every Task must")
    if not is_dataclass(task_class):
        for key in fields:
            raise ConfigError(f"task.{key}: {name} has no fields, because it is not a dataclass")
        return cast(Task, call_user_function(task_class, name, _KEY))
    config = _merged(task_class, name, fields)
    try:
        given = {key: config[key] for key in _fields(task_class)}
        objects = {k: OmegaConf.to_object(v) if OmegaConf.is_config(v) else v for k, v in given.items()}
        return cast(Task, task_class(**objects))
    except OmegaConfBaseException as error:
        raise _of_field(error) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"task: {name}: {error}") from error


def _fields(task_class: type) -> list[str]:
    return [field.name for field in dataclass_fields(task_class) if field.init]


def _merged(task_class: type, name: str, fields: TreeView) -> Any:
    """Return a task's fields as OmegaConf has them, those given laid over the defaults."""
    allowed = _fields(task_class)
    for key in fields:
        if key not in allowed:
            ending = allowed_words(", ".join(allowed), suggest(key, allowed))
            raise ConfigError(f"task.{key}: no such field of {name}{ending}")
    try:
        return OmegaConf.merge(OmegaConf.structured(task_class), dict(fields))
    except OmegaConfBaseException as error:
        raise _of_field(error) from error


def _of_field(error: OmegaConfBaseException) -> ConfigError:
    key_path = f"task.{error.full_key}" if error.full_key else "task"
    reason, *_ = str(error.msg).splitlines()  # the lines after it repeat the key and name the class
    return ConfigError(f"{key_path}: {reason}")


def _describe(value: object) -> str:
    if inspect.isclass(value):
        return f"the class {value.__qualname__}"
    return f"of type {type(value).__qualname__}"


def _locate(error: BaseException) -> str:
    """Return an error's text with its place: the innermost line outside of installed packages, if any."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without the line of this module that called
    own = [frame for frame in frames if not frame.filename.startswith(("<", *INSTALLED_FOLDERS))]
    where = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in (own or frames)[-1:])
    return f"{cause_of(error)}{where}"
