"""A small decoder-only transformer over characters.

Shapes: B batch, T characters of a sequence, H hidden units, K characters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class CharacterTransformer(nn.Module):
    """Embeddings of characters and places, layers of causal attention, and a head: int64 [B, T] to logits [B, T, K].

    Each layer normalises first, as in GPT-2 (Radford et al., 2019), without dropout.

    Args:
        num_characters: K.
        longest: the largest T.
        hidden: H, a multiple of `heads`.
        layers, heads: how many; 1 or more.
    """

    def __init__(self, num_characters: int, longest: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(num_characters, hidden)
        self.places = nn.Embedding(longest, hidden)
        self.layers = nn.ModuleList(_layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, num_characters)
        for table in (self.embedding, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        length = characters.shape[1]
        states = self.embedding(characters) + self.places.weight[:length]
        ahead = nn.Transformer.generate_square_subsequent_mask(length, characters.device)
        for layer in self.layers:
            states = layer(states, src_mask=ahead, is_causal=True)
        logits: Tensor = self.head(self.norm(states))
        return logits

    def tensor_plan(self, ranks: int) -> dict[str, ParallelStyle]:
        """Return the plan by which ranks share out heads and the hidden units between; all else stays whole.

        Raises:
            ValueError: the heads do not divide evenly.
        """
        if self.heads % ranks:
            raise ValueError(f"{self.heads} heads do not divide evenly: choose a number that divides them")
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        from hocket_tasks.heads import HeadsParallel

        return {
            "layers.*.self_attn": HeadsParallel(),
            "layers.*.self_attn.out_proj": RowwiseParallel(),
            "layers.*.linear1": ColwiseParallel(),
            "layers.*.linear2": RowwiseParallel(),
        }


def _layer(hidden: int, heads: int) -> nn.Module:
    return nn.TransformerEncoderLayer(
        hidden, heads, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
