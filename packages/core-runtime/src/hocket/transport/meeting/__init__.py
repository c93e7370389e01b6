"""Where ranks on several hosts meet: a TCPStore of torch.distributed, and what they tell each other there.

Over `torch` they find each other's addresses in it; over `torch` and `mpi` each leaves there what it is doing, for
reports on stalls. What comes from it is bytes, numbers and JSON, which run no code. Whoever reaches its port can read
and write there: the network has to be trusted.
"""

from hocket.transport.meeting.rendezvous import Rendezvous, parse_ports

__all__ = ["Rendezvous", "parse_ports"]
