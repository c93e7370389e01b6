"""The addresses of this host for other hosts, and a socket that listens at all of them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from hocket.errors import UserError

#: An address of a network interface, as text.
Address = str

_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE = "00"


def listen(ports: range | None, backlog: int) -> socket.socket:
    """Return a socket that listens at all of this host's addresses, on one of `ports` or on any port.

    Raises:
        UserError: none of the ports is free.
    """
    for port in ports or [0]:
        for family in (socket.AF_INET6, socket.AF_INET):
            try:
                return _listener(family, port, backlog)
            except OSError as error:
                # Without IPv6 there is IPv4.
                if error.errno == errno.EADDRINUSE:
                    break
                if family == socket.AF_INET:
                    raise UserError(f"cannot listen on port {port}: {error.strerror}") from error
    assert ports
    raise UserError(
        f"no port of HOCKET_PORTS ({ports[0]} to {ports[-1]}) is free: name more ports, one for each rank of a host"
    )


def _listener(family: socket.AddressFamily, port: int, backlog: int) -> socket.socket:
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)


def network_host() -> str:
    """Return an identifier that is equal for processes with the same network interfaces alone."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    return socket.gethostname()


def route_to(host: str, port: int) -> tuple[Address, Address]:
    """Return the address of this host that reaches another, and the other's."""
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing
            return _plain(probe.getsockname()[0]), _plain(probe.getpeername()[0])
    raise UserError(f"there is no route to {host}: name an address that this host can reach")


def is_near(route: tuple[Address, Address]) -> bool:
    """Return whether a route ends on the host where it begins."""
    own, other = route
    return own == other or ipaddress.ip_address(other).is_loopback


def host_addresses() -> list[Address]:
    """Return this host's addresses that others may reach, those of IPv4 first."""
    found = [*(address for _, address in ipv4_interfaces()), *_ipv6_addresses()]
    return [address for address in dict.fromkeys(found) if not ipaddress.ip_address(address).is_loopback]


def _plain(address: str) -> Address:
    """Return an address without its scope, and one of IPv4 in IPv6 as IPv4."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    return str(mapped or parsed)


def ipv4_interfaces() -> Iterator[tuple[str, Address]]:
    """Yield the name and the IPv4 address of each of this host's interfaces that has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, socket.inet_ntoa(answer[20:24])


def _ipv6_addresses() -> Iterator[Address]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, *_ = line.split()
            if scope == _GLOBAL_SCOPE:  # one of a link alone needs the interface's name
                yield str(ipaddress.IPv6Address(int(digits, 16)))
