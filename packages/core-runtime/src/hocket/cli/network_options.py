"""Options of `hocket plan` and `hocket recommend`: the model's size, and the network."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from hocket.cli.click_parts import Command, add_options
from hocket.errors import UserError
from hocket.quantities import bits_per_second, read, seconds

if TYPE_CHECKING:
    from torch import nn

#: A latency without a unit above this many seconds was more likely meant in ms or us.
_LONGEST_LATENCY_S = 1.0

#: The name of a model that a command is given, and the model.
GivenModel = tuple[str, "nn.Module"]

_OPTIONS = (
    click.option(
        "--params", metavar="25M", help="Number of the model's parameters, instead of a task's model."
    ),
    click.option(
        "--model", metavar="MODULE:FUNCTION", help="Function that returns the model, instead of --params."
    ),
    click.option(
        "--bandwidth", metavar="1gbit", help="Bandwidth of each host's link; default: the run's, 10gbit."
    ),
    click.option("--latency", metavar="50us", help="Latency of a message; default: the run's, 20us."),
)


def network_options(command: Command) -> Command:
    """Add the options for the model's size and the network to a command."""
    return add_options(command, _OPTIONS)


def network_overrides(bandwidth: str | None, latency: str | None) -> list[str]:
    """Return `--bandwidth` and `--latency` as overrides of a run's file.

    Raises:
        UserError: an option has a wrong value; names it and says what to write.
    """
    overrides = []
    if bandwidth is not None:
        overrides.append(f"network.bandwidth_bits_per_s={read('--bandwidth', bits_per_second, bandwidth)!r}")
    if latency is not None:
        latency_s = read("--latency", partial(seconds, longest_s=_LONGEST_LATENCY_S), latency)
        overrides.append(f"network.latency_s={latency_s!r}")
    return overrides


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
