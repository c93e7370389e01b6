"""The part of `hocket doctor` that checks the network: interfaces, and this host's name and addresses."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from hocket.cli.finding import Finding

_SUBJECT = "interfaces"
_CLASS = Path("/sys/class/net")


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which a host's name resolves here; none if it does not."""
    try:
        return sorted({str(each[4][0]) for each in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def interfaces_finding(found: Mapping[str, str], name: str, addresses: list[str]) -> Finding:
    """Return the finding on the interfaces through which other hosts may reach this one.

    Args:
        found: the addresses of interfaces, by name.
        name: this host's name.
        addresses: the addresses to which the name resolves.
    """
    outward = {each: address for each, address in found.items() if not ip_address(address).is_loopback}
    listed = ", ".join(f"{each} {address}{_speed(each)}" for each, address in outward.items())
    if found and not outward:
        return Finding.note(
            _SUBJECT, "only loopback: other hosts cannot reach ranks here; runs on one host work"
        )
    if not addresses or all(ip_address(each.partition("%")[0]).is_loopback for each in addresses):
        meant = f"resolves to {', '.join(addresses)} here" if addresses else "does not resolve here"
        return Finding.note(
            _SUBJECT,
            f"{listed}. This host's name, {name}, {meant}, so other hosts cannot reach it by this name. For "
            "runs over several hosts, use IP addresses in --hosts and MASTER_ADDR, or correct /etc/hosts",
        )
    text = f"{listed or 'unknown'}; this host's name, {name}, resolves to {', '.join(addresses)}"
    if len(outward) > 1:
        first = next(iter(outward))
        return Finding.note(
            _SUBJECT,
            f"{text}. If a run over several hosts hangs, MPI may have chosen an interface that other hosts "
            f"cannot reach: name an interface, as in --mpi-arg '--mca btl_tcp_if_include {first}' for Open "
            "MPI",
        )
    return Finding.ok(_SUBJECT, text)


def _speed(interface: str) -> str:
    """Return the speed of an interface as text; many virtual ones give none."""
    try:
        megabits = int((_CLASS / interface / "speed").read_text())
    except (OSError, ValueError):
        return ""
    return f" ({megabits / 1000:g} Gbit/s)" if megabits > 0 else ""
