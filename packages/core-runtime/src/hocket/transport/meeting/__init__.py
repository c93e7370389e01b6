"""The rendezvous of ranks on several hosts: a TCPStore of torch.distributed, and the ranks' entries in it.

Over `torch` they find each other's addresses in it; over `torch` and `mpi` each stores its state there, for reports on
stalls. Its contents are bytes, numbers and JSON, which run no code. Any process that reaches its port can read and
write there: the network has to be trusted.
"""

from hocket.transport.meeting.rendezvous import Rendezvous, parse_ports

__all__ = ["Rendezvous", "parse_ports"]
