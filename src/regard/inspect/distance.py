"""How far heads look in an image: between the middles of squares, by weight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from regard.inspect.given import Shot
from regard.inspect.maps import Map


def between_squares(rows: int, columns: int, size: int) -> Tensor:
    """Pixels between the middles of any two squares, (squares, squares)."""
    row_S = torch.arange(rows).repeat_interleave(columns)
    column_S = torch.arange(columns).repeat(rows)
    place_S2 = torch.stack((row_S, column_S), dim=1).float() * size
    return torch.cdist(place_S2, place_S2)


def square_distance(weights_BHTS: Tensor, far_SS: Tensor) -> Tensor:
    """The mean distance of every square's look, (B, H, squares). What goes to the image as a whole has no distance."""
    squares_BHSS = weights_BHTS[..., 1:, 1:]
    total_BHS = squares_BHSS.sum(-1).clamp(min=1e-9)
    mean_BHS: Tensor = (squares_BHSS * far_SS).sum(-1) / total_BHS
    return mean_BHS


def square_distances(maps: Sequence[Map], shot: Shot) -> dict[str, np.ndarray]:
    """For every map of an image, the mean distance of each head in pixels."""
    far_SS = between_squares(shot.rows, shot.columns, shot.size)
    return {m.name: square_distance(torch.from_numpy(m.weights_HTS)[None], far_SS)[0].mean(-1).numpy() for m in maps}
