"""The network of the trained inverter, and its loss.

Operands have different numbers of rows. All of a batch lie end to end, ``(R, ·)``, and are laid out as
``(B, longest, ·)`` only where rows of one operand attend to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from evals.attacks.drivers.nearest import Block, Float32, Int64


@dataclass(frozen=True, slots=True)
class Batch:
    """Operands end to end.

    ``rows`` ``(R, d)``; ``places`` ``(R,)`` int64, where each row lies in ``(B · longest)``; ``present``
    ``(B, longest)`` bool, which of these places are taken.
    """

    rows: Tensor
    places: Tensor
    present: Tensor

    @classmethod
    def of(cls, operands: Sequence[Float32]) -> Batch:
        """A batch of operands ``(s, d)`` float32 each."""
        lengths = np.asarray([len(rows) for rows in operands])
        present = np.arange(lengths.max()) < lengths[:, None]
        return cls(
            torch.from_numpy(np.concatenate(operands)),
            torch.from_numpy(np.flatnonzero(present)),
            torch.from_numpy(present),
        )


class _Layer(nn.Module):
    """A pre-norm encoder layer without positions: the rows of an operand are a set."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """``(R, width)`` to the same."""
        x = x + self.out(self._attend(self.qkv(self.attention_norm(x)), batch))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out

    def _attend(self, qkv: Tensor, batch: Batch) -> Tensor:
        count, longest = batch.present.shape
        laid = qkv.new_zeros(count * longest, qkv.shape[1]).index_copy(0, batch.places, qkv)
        query, key, value = laid.view(count, longest, 3, self._heads, -1).permute(2, 0, 3, 1, 4).unbind()
        present = batch.present[:, None, None]
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=present)
        return mixed.transpose(1, 2).reshape(count * longest, -1)[batch.places]


class Inverter(nn.Module):
    """Rows of operands to predicted embeddings of norm 1: a linear map of each row, corrected by what a
    transformer makes of the whole operand.

    Args:
        width_in: features of a row; all but the last go through the linear map.
        skip: the linear map ``(width_in - 1, hidden)`` to start from, and ``offset`` ``(hidden,)``.
        width, heads, layers: of the transformer.
    """

    def __init__(
        self, width_in: int, skip: Float32, offset: Float32, *, width: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(width_in, width)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.leave = nn.Linear(width, skip.shape[1])
        self.skip = nn.Linear(*skip.shape)
        self.temperature = nn.Parameter(torch.tensor(3.0))
        with torch.no_grad():
            self.skip.weight.copy_(torch.from_numpy(skip.T.copy()))
            self.skip.bias.copy_(torch.from_numpy(offset))
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, batch: Batch) -> Tensor:
        """``(R, hidden)``."""
        x = self.enter(batch.rows)
        for layer in self.layers:
            x = layer(x, batch)
        return functional.normalize(self.skip(batch.rows[:, :-1]) + self.leave(x), dim=-1)


def loss(
    model: Inverter,
    batch: Batch,
    found: Sequence[Block],
    candidates: Int64,
    answers: Float32,
    *,
    masked: bool,
) -> Tensor:
    """Mean cross-entropy of the tokens of ``found`` among ``candidates`` (sorted, the true ones included).

    Of each operand's set of tokens under the mean of all its rows' predictions and, unless ``masked``,
    also of the token of each row.
    """
    logits = model(batch) @ torch.from_numpy(answers[candidates]).T * model.temperature.exp()
    log_p = torch.log_softmax(logits, dim=-1)
    tokens = np.searchsorted(candidates, np.concatenate([b.tokens for b in found]))
    # Row of the batch by token and row of its operand: (T, longest); of those that are absent, any.
    rows = np.cumsum(batch.present.numpy()).reshape(batch.present.shape) - 1
    owner = np.repeat(np.arange(len(found)), [len(b.tokens) for b in found])
    absent = ~batch.present[torch.from_numpy(owner)]
    of_token = log_p[torch.from_numpy(rows[owner]), torch.from_numpy(tokens)[:, None]]
    pooled = torch.logsumexp(of_token.masked_fill(absent, -torch.inf), dim=1)
    by_set = -(pooled - (~absent).sum(dim=1).log()).mean()
    if masked:
        return by_set
    aligned = np.concatenate([b.aligned for b in found])
    own = np.take_along_axis(rows[owner], aligned[:, None], axis=1)[:, 0]
    return by_set - log_p[torch.from_numpy(own), torch.from_numpy(tokens)].mean()
