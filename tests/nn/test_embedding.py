"""Patch embeddings against a convolution and by hand, and the transform before the LM head by its formula."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from regard.config import PatchConfig, Stack
from regard.nn.embedding import ImageEmbedding, LmHeadTransform


@pytest.mark.parametrize(("height", "width", "channels", "size"), [(6, 4, 3, 2), (4, 4, 1, 4), (3, 9, 2, 3)])
def test_patches_are_a_convolution_with_strides(height: int, width: int, channels: int, size: int) -> None:
    """The matrix is the kernel, flattened; the trained vector comes first."""
    torch.manual_seed(0)
    patches = PatchConfig(height=height, width=width, channels=channels, size=size)
    embedding, images = ImageEmbedding(patches, 5), torch.randn(2, channels, height, width)
    torch.nn.init.normal_(embedding.first)
    kernel = embedding.project.weight.view(5, channels, size, size)
    expected = F.conv2d(images, kernel, embedding.project.bias, stride=size).flatten(2).transpose(1, 2)
    found = embedding(images)
    assert found.shape == (2, 1 + patches.count, 5)
    assert torch.equal(found[:, 0], embedding.first.expand(2, -1))
    torch.testing.assert_close(found[:, 1:], expected, atol=1e-5, rtol=1e-5)


def test_a_patch_is_its_own_pixels_only() -> None:
    embedding = ImageEmbedding(PatchConfig(height=4, width=6, channels=2, size=2), 3)
    images = torch.randn(1, 2, 4, 6)
    before = embedding(images)
    images[0, 1, 2, 5] += 1  # second row of patches, third column
    changed = (embedding(images) - before).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False] * 6 + [True]


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_transform(norm: str) -> None:
    torch.manual_seed(1)
    transform, x = (
        LmHeadTransform(Stack(width=6, heads=2, activation="tanh", norm=norm, norm_eps=0.1)),
        torch.randn(3, 6),
    )
    hidden = (x @ transform.dense.weight.T + transform.dense.bias).tanh()
    centred = hidden - hidden.mean(-1, keepdim=True) if norm == "layer" else hidden
    expected = centred / (centred.square().mean(-1, keepdim=True) + 0.1).sqrt()
    torch.testing.assert_close(transform(x), expected, atol=1e-5, rtol=1e-5)
