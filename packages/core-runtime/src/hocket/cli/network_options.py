"""Options of `hocket plan` and `hocket recommend`: the model's size, and the network."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from hocket.cli.click_parts import Command, Option, add_options
from hocket.errors import UserError
from hocket.quantities import bits_per_second, read, seconds

if TYPE_CHECKING:
    from torch import nn

#: A latency without a unit above this many seconds was more likely meant in ms or us.
_LONGEST_LATENCY_S = 1.0

#: The name of a model that a command is given, and the model.
GivenModel = tuple[str, "nn.Module"]


def setting_option(
    option: str, key: str, reader: Callable[[str], object], metavar: str, words: str
) -> Option:
    """Return an option for a quantity that is a setting of a run; its command gets a list of overrides.

    Args:
        option: its name, such as `--bandwidth`.
        key: the setting's key.
        reader: reads the quantity's text.
        metavar, words: for the help.
    """

    def overrides(_context: object, _parameter: object, text: str | None) -> list[str]:
        return [] if text is None else [f"{key}={read(option, reader, text)!r}"]

    return click.option(option, metavar=metavar, callback=overrides, help=words)


_OPTIONS = (
    click.option("--params", metavar="25M", help="Number of parameters, instead of --model or a task."),
    click.option("--model", metavar="MODULE:FUNCTION", help="Function that returns the model."),
    setting_option(
        "--bandwidth", "network.bandwidth_bits_per_s", bits_per_second, "1gbit", "Bandwidth of a host's link."
    ),
    setting_option(
        "--latency",
        "network.latency_s",
        partial(seconds, longest_s=_LONGEST_LATENCY_S),
        "50us",
        "Latency of a message.",
    ),
)


def network_options(command: Command) -> Command:
    """Add the options for the model's size and the network to a command."""
    return add_options(command, _OPTIONS)


def model_asked(params: str | None, model: str | None) -> GivenModel | None:
    """Return the model that `--params` or `--model` gives, without memory; None if neither is given.

    Raises:
        UserError: both are given, the number is none, or the user's function cannot be had or returns no model.
    """
    from torch import nn

    from hocket.plan.models import MATRICES, model_of, model_of_size
    from hocket.task.user import call_user_function, load_user_object

    if params is not None and model is not None:
        raise UserError("--params and --model both give the model: leave one out")
    if params is not None:
        return f"{MATRICES} equal matrices", model_of_size(params)
    if model is None:
        return None
    build = load_user_object(model, "--model")
    built = model_of(lambda: call_user_function(build, model, "--model"))
    if not isinstance(built, nn.Module):
        raise UserError(f"--model: {model} returned {type(built).__name__}, not a torch.nn.Module")
    return model, built
