"""What a rank does with the messages that come: RedSync's addition against core's, and the zeros below them.

python packages/redsync/benchmarks/decompression.py [--size 16] [--ranks 2 8 32] [--threads N] [--repeats N]
"""

from __future__ import annotations

import argparse

import torch
from measuring import medians

from hocket.compressor import Compressor, Message, TopK
from hocket.testing.compressor import make_segment
from hocket_redsync.hybrid import Trimmed

DENSITY = 0.001


def messages_of(compressor: Compressor, numel: int, ranks: int) -> list[Message]:
    """Return as many messages for one segment."""
    segment = make_segment([numel])
    messages = []
    for rank in range(ranks):
        segment.outgoing[:numel] = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        messages.append(compressor.compress(segment, compressor.init(segment), 0))
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=float, default=16, help="in 2**20 elements")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    numel = int(options.size * (1 << 20))
    out = torch.zeros(numel)
    redsync, core = Trimmed(DENSITY, dense_below_kb=0.0, correct_momentum=False), TopK(DENSITY)
    for ranks in options.ranks:
        own, cores = messages_of(redsync, numel, ranks), messages_of(core, numel, ranks)
        seconds = medians(
            {
                "zero": out.zero_,
                "core": lambda cores=cores: [core.accumulate(message, 1.0, out) for message in cores],
                "redsync": lambda own=own: [redsync.accumulate(message, 1.0, out) for message in own],
            },
            options.repeats,
        )
        told = ", ".join(f"{name} {1e3 * taken:.3f} ms" for name, taken in seconds.items())
        print(f"{options.size:g} M elements, {ranks} ranks, {options.threads} threads: {told}", flush=True)


if __name__ == "__main__":
    main()
