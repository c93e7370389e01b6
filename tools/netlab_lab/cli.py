"""The command line: make a lab, run one command in it, report, remove it."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from netlab_lab import lab as registry
from netlab_lab import links
from netlab_lab.lab import Lab
from netlab_lab.links import Traffic
from netlab_lab.mpi import by_environment, find_mpiexec, mpiexec_command, ranks_per_host
from netlab_lab.system import NetlabError, check_system

_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds that a command may take to end by itself after a request.
_ENDING_TIMEOUT_S = 10.0
# Between looks at the links, for a command that sends nothing any more.
_LOOK_EVERY_S = 1.0
#: The status of a command that was ended so, as timeout(1) has it.
_STALLED = 124
_PR_SET_PDEATHSIG = 1

_EXAMPLES = """\
examples:
  tools/netlab --hosts 4 --rate 100mbit run -n 8 -- .venv/bin/hocket run sgd --out runs/x
  tools/netlab --hosts 2 --rate 1gbit shell 0
  tools/netlab --lab KEY exec 1 -- ping -c 3 host0     in the lab of that shell, from another terminal
  tools/netlab clean                                   remove what killed netlabs have left
"""


class _Interrupted(Exception):  # noqa: N818 (no error: somebody wants an end)
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def main(arguments: list[str]) -> int:
    """Run netlab and return its exit status: the command's, 2 for what the user can change, 128 + a signal."""
    options = _parse(arguments)
    for number in _ENDING_SIGNALS:
        # nohup has a closed terminal ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        check_system()
        return int(options.action(options))
    except NetlabError as error:
        _say(str(error))
        return 2
    except _Interrupted as interruption:
        what = (
            "ended, and the lab removed"
            if options.lab is None
            else f"ended; lab {options.lab} is still there"
        )
        _say(f"{interruption.signal.name}: {what}")
        return 128 + interruption.signal


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/netlab",
        description="Hosts with slow links on one machine: network namespaces, shaped links, real MPI. Needs root.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help=f"how many, 1 to {links.MAX_HOSTS} (default: 2)")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, each way (default: 1gbit)")
    parser.add_argument("--lab", metavar="KEY", help="use this running lab instead of making one")
    parser.add_argument("--latency", help=argparse.SUPPRESS)
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    run = actions.add_parser("run", help="run a command as MPI ranks over the hosts, and count bytes")
    run.add_argument("-n", "--ranks", type=int, help="how many (default: one per host)")
    run.add_argument("--mpi", default="", metavar="OPTIONS", help="more options of mpiexec, in one word")
    run.add_argument(
        "--env",
        action="store_true",
        help="ranks find RANK, MASTER_ADDR, ... and nothing of mpiexec: transport torch",
    )
    run.add_argument(
        "--limit",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="end the command if no byte crosses a link for so long, as its mpiexec may hang (default: 600)",
    )
    run.add_argument("--report", type=Path, metavar="FILE", help="write the counts there too, as JSON")
    run.add_argument("command", nargs="*", metavar="-- COMMAND")
    run.set_defaults(action=_run)

    execute = actions.add_parser("exec", help="run a command inside one host")
    execute.add_argument("host", type=int)
    execute.add_argument("command", nargs="*", metavar="-- COMMAND")
    execute.set_defaults(action=_exec)

    shell = actions.add_parser("shell", help="open a shell inside one host")
    shell.add_argument("host", type=int, nargs="?", default=0)
    shell.set_defaults(action=_shell)

    actions.add_parser("list", help="show the labs that are running").set_defaults(action=_list)
    actions.add_parser("clean", help="remove what killed netlabs have left").set_defaults(action=_clean)

    # What follows the first `--` is the command's, whatever it looks like.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:cut])
    command = arguments[cut + 1 :]
    if "command" not in options:
        if command:
            parser.error("only run and exec take a command")
    elif options.command or not command:
        parser.error("write `--` and then the command")
    options.command = command
    if "limit" in options and not options.limit > 0:
        parser.error("--limit must be more than 0")
    if options.latency is not None:
        parser.error(
            "there is no --latency: it takes the kernel's netem queue, which many kernels are built without"
        )
    if not 1 <= options.hosts <= links.MAX_HOSTS:
        parser.error(f"--hosts must be 1 to {links.MAX_HOSTS}")
    try:
        links.parse_rate(options.rate)
    except ValueError as error:
        parser.error(f"--rate: {error}")
    return options


@contextlib.contextmanager
def _lab(options: argparse.Namespace) -> Iterator[Lab]:
    if options.lab is not None:
        yield registry.find(options.lab)
        return
    with registry.create(options.hosts, options.rate) as lab:
        yield lab


def _run(options: argparse.Namespace) -> int:
    mpiexec = find_mpiexec()
    if options.report is not None and not options.report.parent.is_dir():
        raise NetlabError(f"--report {options.report}: there is no folder {options.report.parent}")
    with _lab(options) as lab:
        ranks = lab.hosts if options.ranks is None else options.ranks
        if ranks < 1:
            raise NetlabError(f"-n {ranks}: at least one rank")
        _share_cores(ranks)
        rank = by_environment(options.command) if options.env else options.command
        command = mpiexec_command(mpiexec, lab, ranks, shlex.split(options.mpi), rank)
        before, start_s = lab.traffic(), time.monotonic()
        limit_s = options.limit if min(ranks, lab.hosts) > 1 else math.inf
        status = _wait(lab.inside(0, command), signal.SIGTERM, apart=True, stalled=_silence(lab, limit_s))
        seconds = time.monotonic() - start_s
        counted = [now - then for now, then in zip(lab.traffic(), before, strict=True)]
        _report(lab, ranks, seconds, counted, status)
        if options.report is not None:
            hosts = [vars(host) for host in counted]
            found = {"lab": lab.key, "rate": lab.rate, "ranks": ranks, "seconds": seconds, "status": status}
            options.report.write_text(json.dumps({**found, "hosts": hosts}, indent=2) + "\n")
    return status


def _silence(lab: Lab, limit_s: float) -> Callable[[], bool]:
    """Return a function that returns whether no byte has crossed a lab's links for `limit_s`, and says so."""
    traffic, since_s = lab.traffic(), time.monotonic()

    def lasts() -> bool:
        nonlocal traffic, since_s
        if time.monotonic() - since_s < limit_s:
            return False
        before, traffic, since_s = traffic, lab.traffic(), time.monotonic()
        if traffic != before:
            return False
        _say(
            f"no byte has crossed a link for {limit_s:g} s: the command was killed, as its mpiexec seems to hang. "
            "`--limit SECONDS` allows longer pauses"
        )
        return True

    return lasts


def _share_cores(ranks: int) -> None:
    """Limit each rank's threads to its share of the cores, as each host believes that it has all of them.

    With so many threads per rank, a small model trains 7 times slower.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))


def _exec(options: argparse.Namespace) -> int:
    with _lab(options) as lab:
        _check_host(lab, options.host)
        _share_cores(lab.hosts)
        return _wait(lab.inside(options.host, options.command), signal.SIGTERM)


def _shell(options: argparse.Namespace) -> int:
    # The shell's own business; it comes here too, because the terminal is shared.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    with _lab(options) as lab:
        _check_host(lab, options.host)
        _share_cores(lab.hosts)
        others = ", ".join(f"host{host} {links.address(host)}" for host in range(lab.hosts))
        _say(
            f"lab {lab.key}: {others}; from other terminals: tools/netlab --lab {lab.key} exec HOST -- COMMAND"
        )
        # Interactive shells ignore SIGTERM.
        return _wait(lab.inside(options.host, [os.environ.get("SHELL", "/bin/sh")]), signal.SIGHUP)


def _list(options: argparse.Namespace) -> int:
    for owner, lab in registry.labs():
        print(f"{lab.key}: {lab.hosts} hosts at {lab.rate}, process {owner}")
    return 0


def _clean(options: argparse.Namespace) -> int:
    for owner, lab in registry.remove_dead():
        print(f"removed lab {lab.key} of process {owner}")
    return 0


def _check_host(lab: Lab, host: int) -> None:
    if not 0 <= host < lab.hosts:
        raise NetlabError(f"no host {host}: the lab's are 0 to {lab.hosts - 1}")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted(number)


def _wait(
    command: list[str],
    ending: signal.Signals,
    *,
    apart: bool = False,
    stalled: Callable[[], bool] = lambda: False,
) -> int:
    """Run a command and return its exit status; end it when this process is interrupted or killed.

    Args:
        command: with its arguments.
        ending: the signal that it ends at.
        apart: in a process group of its own, which a terminal's Ctrl-C and keyboard do not reach: mpiexec takes
            a second signal for an order to leave its ranks alone.
        stalled: returns whether the command is to be killed, as it does not end; asked once a second.
    """

    def end_with_parent() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ending)

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if apart and sys.stdin.isatty() else None,
        process_group=0 if apart else None,
        preexec_fn=end_with_parent,  # noqa: PLW1509 (no other thread runs that could hold a lock)
    )
    try:
        status = _end_of(process, stalled)
    except _Interrupted:
        process.send_signal(ending)
        # Once more means: now. What it has started is ended when the lab is removed.
        with contextlib.suppress(subprocess.TimeoutExpired, _Interrupted):
            process.wait(_ENDING_TIMEOUT_S)
        process.kill()
        raise
    return 128 - status if status < 0 else status


def _end_of(process: subprocess.Popen[bytes], stalled: Callable[[], bool]) -> int:
    """Wait for a process's end, or kill it once it is stalled; return its status."""
    end = os.pidfd_open(process.pid)
    try:
        while not select.select([end], [], [], _LOOK_EVERY_S)[0]:
            if stalled():
                process.kill()
                process.wait()
                return _STALLED
    finally:
        os.close(end)
    return process.wait()


def _report(lab: Lab, ranks: int, seconds: float, counted: list[Traffic], status: int) -> None:
    _say(
        f"{ranks} ranks on {lab.hosts} hosts, links of {lab.rate}: exit status {status} after {seconds:.2f} s"
    )
    _say("host  ranks     sent MB  received MB  sent Mbit/s  received Mbit/s  frames lost")
    for host, (count, link) in enumerate(zip(ranks_per_host(ranks, lab.hosts), counted, strict=True)):
        rates = (8e-6 * volume / seconds for volume in (link.sent, link.received))
        _say(
            "{:4d}  {:5d}  {:10.3f}  {:11.3f}  {:11.2f}  {:15.2f}  {:11d}".format(
                host, count, link.sent / 1e6, link.received / 1e6, *rates, link.lost
            )
        )


def _say(text: str) -> None:
    print(f"netlab: {text}", file=sys.stderr, flush=True)
