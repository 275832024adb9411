"""Position encodings as pictures: whatever a stack does about position, as numbers in rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from regard.nn.position import Alibi, Bucket, Learned, Position, Rotary

WIDEST = 256  # columns shown


@dataclass(frozen=True)
class Picture:
    """A matrix with names for its axes; `first_column` is the number of the first one."""

    name: str
    caption: str
    rows: str
    columns: str
    values_RC: np.ndarray
    first_column: int = 0


def picture(tower: str, position: Position, length: int, causal: bool) -> Picture | None:
    """What a position encoding looks like for so many positions, or None where there is none."""
    with torch.no_grad():
        pos_1T = torch.arange(length, device=_device(position)).unsqueeze(0)
        if isinstance(position, Learned):
            pos_1T = pos_1T[:, : position.table.num_embeddings]
        embedded = position.embed(pos_1T)
        if embedded is not None:
            kind = "trained, one row per position" if isinstance(position, Learned) else "sines and cosines"
            shown = embedded[0, :, :WIDEST]
            cut = f"; the first {WIDEST} of {embedded.shape[-1]} numbers" if embedded.shape[-1] > WIDEST else ""
            caption = f"Added to the embeddings of the {tower}: {kind}{cut}."
            return Picture(tower, caption, "position", "dimension", shown.cpu().numpy())
        if isinstance(position, Rotary):
            right_11TE = torch.ones(1, 1, length, position.width, device=pos_1T.device)
            right_11TE[..., position.width // 2 :] = 0.0  # the first number of every pair is its cosine once turned
            cos_TE = position.rotate(right_11TE, pos_1T)[0, 0, :, : position.width // 2]
            caption = (
                f"Queries and keys of the {tower} are turned: the cosine of the angle of every pair of dimensions."
            )
            return Picture(tower, caption, "position", "pair of dimensions", cos_TE.cpu().numpy())
        if isinstance(position, Alibi | Bucket):
            last = length if causal else 2 * length
            keys_1S = torch.arange(last + 1, device=pos_1T.device).unsqueeze(0)
            bias = position.bias(torch.full_like(keys_1S[:, :1], length), keys_1S)
            caption = f"Added to the scores of the {tower}, by head and by how far the key is from the query."
            return Picture(tower, caption, "head", "offset", bias[0, :, 0].cpu().numpy(), -length)
    return None


def _device(position: Position) -> torch.device:
    return next((x.device for x in [*position.parameters(), *position.buffers()]), torch.device("cpu"))
