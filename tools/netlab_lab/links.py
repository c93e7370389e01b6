"""One lab's network: hosts on a switch, each by a link of its own with a limited rate.

Everything, also the switch, lies in namespaces of the lab. So nothing is added to the machine's own network, its
firewall does not see the traffic, labs cannot meet even with the same addresses, and removing the namespaces
removes all.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from netlab_lab.system import NetlabError, call

NETWORK = "10.77.0.0/24"
MAX_HOSTS = 250

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
# What may leave at once after a pause: 1 ms of the rate, so that also a short message takes its time, but no
# less than two frames, or nothing could leave at all.
_BURST_S = 0.001
_MIN_BURST_BYTES = 2 * 1514
# What waits at the switch for a link before packets are lost, as in a switch with ample buffers.
_QUEUE_S = 0.05
_MIN_QUEUE_BYTES = 128 * 1024


@dataclass(frozen=True)
class Link:
    """The capacity of every host's link, in each direction.

    Attributes:
        rate_bit_s: bits per second, headers of Ethernet, IP and TCP included.
    """

    rate_bit_s: int

    def shape(self, namespace: str, interface: str) -> None:
        """Limit what leaves through an interface."""
        rate_bytes_s = self.rate_bit_s / 8
        burst = max(int(rate_bytes_s * _BURST_S), _MIN_BURST_BYTES)
        queue = burst + max(int(rate_bytes_s * _QUEUE_S), _MIN_QUEUE_BYTES)
        bucket = ["rate", f"{self.rate_bit_s}bit", "burst", f"{burst}b", "limit", f"{queue}b"]
        call("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *bucket)


@dataclass(frozen=True)
class Traffic:
    """The traffic of one host's link: bytes with all headers, frames, and frames lost in its queues."""

    sent: int
    received: int
    lost: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received, self.lost - earlier.lost)


def parse_rate(text: str) -> int:
    """Return the bits per second of a rate as `tc` writes it: `100mbit`, `2.5gbit`.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
    rate = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if rate < 8000:
        raise ValueError(f"{text!r} is no rate: write it like 100mbit or 2.5gbit, at least 8kbit")
    return rate


def address(host: int) -> str:
    """Return the address of a host; the same in every lab."""
    return f"10.77.0.{host + 1}"


def connect(switch: str, hosts: list[str], link: Link) -> None:
    """Make the namespaces of a switch and of its hosts, and the links between them.

    Raises:
        NetlabError: the system refused.
    """
    call("ip", "netns", "add", switch)
    call("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    call("ip", "-n", switch, "link", "set", "bridge", "addrgenmode", "none", "up")
    for number, host in enumerate(hosts):
        port = f"port{number}"
        call("ip", "netns", "add", host)
        call("ip", "-n", host, "link", "set", "lo", "up")
        call(
            *("ip", "-n", switch, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", host),
        )
        # No IPv6 addresses: finding routers and neighbours would add to the counted bytes.
        call("ip", "-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
        call("ip", "-n", host, "link", "set", "eth0", "addrgenmode", "none")
        call("ip", "-n", host, "address", "add", f"{address(number)}/24", "dev", "eth0")
        link.shape(host, "eth0")
        link.shape(switch, port)
        call("ip", "-n", host, "link", "set", "eth0", "up")


def traffic(switch: str, hosts: list[str]) -> list[Traffic]:
    """Return what has crossed each host's link so far.

    The shapers are read, not the interfaces: with segmentation offload an interface sees up to 64 KB with one
    header, where the shaper counts, and delays, the frames that a real link would carry.
    """
    counts = []
    for number, host in enumerate(hosts):
        up, down = _shaper(host, "eth0"), _shaper(switch, f"port{number}")
        counts.append(Traffic(up["bytes"], down["bytes"], up["drops"] + down["drops"]))
    return counts


def _shaper(namespace: str, interface: str) -> dict[str, int]:
    shown = call("tc", "-n", namespace, "-s", "-j", "qdisc", "show", "dev", interface)
    disciplines: list[dict[str, Any]] = json.loads(shown)
    for discipline in disciplines:
        if discipline["kind"] == "tbf":
            return discipline
    raise NetlabError(f"{interface} of {namespace} has lost its shaper")
