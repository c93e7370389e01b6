"""The options of `hocket run` and `hocket resume` on display, trace, report and checks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.click_parts import Command, add_options
from hocket.errors import UserError

if TYPE_CHECKING:
    from hocket.training.observer import Display
    from hocket.training.run import RunConfig


@dataclass(frozen=True)
class RunOptions:
    """The options of the command line beside the run's file.

    Attributes:
        trace: write a trace.
        trace_steps: the steps in the trace, as `100:120`; None for all, or as the file says.
        report: write a page on the run.
        print_config: print the complete configuration instead of training.
        dry_run: check everything and print what would be started, instead of training.
        verbose: show the configuration first, and bytes sent and waits in each line.
        quiet: show errors only.
    """

    trace: bool = False
    trace_steps: str | None = None
    report: bool = False
    print_config: bool = False
    dry_run: bool = False
    verbose: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.verbose and self.quiet:
            raise UserError("-v prints more and -q less: give one of them")

    @property
    def only_shows(self) -> bool:
        """True if nothing is trained."""
        return self.dry_run or self.print_config

    @property
    def display(self) -> Display:
        """The display of the run on this process's output."""
        from hocket.launch.joining import launched
        from hocket.training.observer import Display

        if self.quiet:
            return Display.QUIET
        if self.verbose:
            return Display.VERBOSE
        # Open MPI's launcher gives its ranks a terminal, whatever its own output goes to.
        return Display.BAR if sys.stdout.isatty() and launched() is None else Display.LINES

    @property
    def words(self) -> list[str]:
        """The options that ranks started elsewhere need, too, as words."""
        given = {"--trace": self.trace, "--report": self.report, "-v": self.verbose, "-q": self.quiet}
        words = [word for word, is_given in given.items() if is_given]
        return [*words, *([f"--trace-steps={self.trace_steps}"] if self.trace_steps else [])]

    def traced(self, run: RunConfig) -> RunConfig:
        """Return a run with the trace that the options ask for.

        Raises:
            UserError: `trace_steps` is malformed.
        """
        if self.trace_steps is None:
            return replace(run, trace=self.trace or run.trace)
        first, separator, end = self.trace_steps.partition(":")
        try:
            if not separator:
                raise ValueError
            return replace(run, trace=True, trace_steps=[int(first or 0), int(end)])
        except ValueError as error:
            raise UserError(
                f"--trace-steps {self.trace_steps}: give the first step, counted from 0, and the step after the "
                "last, such as 100:120"
            ) from error


_OPTIONS = (
    click.option(
        "--trace", is_flag=True, help="Write trace.json.gz, for https://ui.perfetto.dev, to the results."
    ),
    click.option("--trace-steps", metavar="FIRST:END", help="Trace only these steps, such as 100:120."),
    click.option(
        "--report", is_flag=True, help="Write report.html, a page with figures of the run, to the results."
    ),
    click.option(
        "--print-config",
        is_flag=True,
        help="Print the complete configuration as a YAML file; do not train.",
    ),
    click.option(
        "--dry-run",
        is_flag=True,
        help="Check everything and print the run that would start; do not start it.",
    ),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        help="Show the configuration first, and bytes and waits in each line.",
    ),
    click.option("-q", "--quiet", is_flag=True, help="Show errors only."),
)


def run_options(command: Command) -> Command:
    """Add these options to a command, which gets them as one argument, `options`."""
    names = list(RunOptions.__dataclass_fields__)

    @wraps(command)
    def with_options(**given: Any) -> object:
        options = RunOptions(**{name: given.pop(name) for name in names})
        return command(**given, options=options)

    return add_options(with_options, _OPTIONS)
