"""Transports, which move bytes between ranks: the contract in `peer`; `mpi`, `virtual` and `single`."""
