"""Hosts and their places, as users write them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hocket.errors import UserError
from hocket.launch.hosts import Host, are_here, parse_hosts, share_out

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,9}", fullmatch=True)


@given(st.dictionaries(NAMES, st.integers(1, 99), min_size=1))
@example({f"node{number}": 8 for number in range(64)})
def test_what_is_written_is_read(places: dict[str, int]) -> None:
    hosts = tuple(Host(name, ranks) for name, ranks in places.items())
    assert parse_hosts(",".join(map(str, hosts))) == hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", (Host("a", 1),)),
        ("gpu-01.lab:8, gpu-02.lab", (Host("gpu-01.lab", 8), Host("gpu-02.lab", 1))),
        ("2x8", (Host("", 8), Host("", 8))),
        ("10.0.0.1:2,[fe80::1%eth0]:3", (Host("10.0.0.1", 2), Host("[fe80::1%eth0]", 3))),
    ],
)
def test_the_forms(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


def test_a_hostfile_of_either_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text(
        "# ours\na slots=8\nb:4  # half of it is somebody else's\n\nc\nd slots = 2 max_slots=4\n"
    )
    monkeypatch.chdir(tmp_path)
    assert parse_hosts("hosts") == (Host("a", 8), Host("b", 4), Host("c", 1), Host("d", 2))
    (tmp_path / "hosts").write_text("a slots=8\nb 8\n")
    with pytest.raises(UserError, match=r"^hostfile hosts, line 2: 'b 8' is not of the form `a slots=8` or"):
        parse_hosts("hosts")
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(UserError, match=r"^hostfile hosts: give each host 1 rank or more$"):
        parse_hosts("hosts")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "hosts 'a:0': give each host 1 rank or more"),
        ("0x8", "hosts '0x8': give each host 1 rank or more"),
        ("a:4,a:4", "hosts 'a:4,a:4': a is named twice: name it once, with"),
        ("8", "hosts '8': write 8x1 for 8 hosts of one rank, or 1x8 for 8 ranks on one host"),
        ("a:b", "hosts 'a:b': 'a:b' is not a host; write a:8,b:8, or 4x8"),
        ("a,,b", "hosts 'a,,b': '' is not a host"),
        ("./hosts", "hosts './hosts': './hosts' is not a host, and there is no such file"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_hosts(text)
    assert str(refused.value).startswith(message)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.data())
def test_hosts_are_filled_one_after_the_other(places: list[int], data: st.DataObject) -> None:
    hosts = [Host(f"h{number}", ranks) for number, ranks in enumerate(places)]
    assert share_out(hosts, None) == tuple(hosts)
    ranks = data.draw(st.integers(1, sum(places)))
    shared = share_out(hosts, ranks)
    assert sum(host.ranks for host in shared) == ranks
    assert list(shared[:-1]) == hosts[: len(shared) - 1]
    assert 0 < shared[-1].ranks <= hosts[len(shared) - 1].ranks


def test_too_many_ranks_for_the_places() -> None:
    with pytest.raises(UserError, match=r"^-n 9, but the hosts have slots for only 4 ranks: .* such as a:5$"):
        share_out(parse_hosts("a:2,b:2"), 9)


def test_this_host_is_known_by_its_names() -> None:
    assert are_here(parse_hosts("localhost:4"))
    assert are_here(parse_hosts(socket.gethostname()))
    assert not are_here(parse_hosts("localhost:4,elsewhere:4"))


@pytest.mark.parametrize("text", ["100000000x1", "a:99999999", "a:40000,b:40000"])
def test_more_ranks_than_any_job_has(text: str) -> None:
    with pytest.raises(UserError, match=r" ranks, but Hocket plans and starts at most 65536$"):
        parse_hosts(text)
    assert len(parse_hosts("65536x1")) == 65536
