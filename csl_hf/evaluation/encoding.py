"""The one way in which the evaluators call an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    Encode = Callable[[list[str]], "np.ndarray | torch.Tensor"]


def to_numpy(array: Any) -> np.ndarray:
    """Return a float64 array for a NumPy array, nested list, or torch tensor of any device and dtype."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()  # NumPy has no bfloat16
    return np.asarray(array, dtype=np.float64)


def encode_texts(encode: Encode, texts: Sequence[str], batch_size: int = 128) -> np.ndarray:
    """Return the embeddings of ``texts``, shape (N, d), calling ``encode`` with at most ``batch_size`` texts.

    Each distinct text is encoded once, and texts of similar length together, so that little is padded.

    Raises:
        ValueError: If there is no text, ``batch_size`` is less than 1, or ``encode`` returns anything but one
            row for each text.
    """
    if not texts:
        raise ValueError("There are no texts to encode; give at least one.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; give a number of at least 1.")
    distinct = sorted(set(texts), key=lambda text: (len(text), text))
    blocks = []
    for start in range(0, len(distinct), batch_size):
        batch = distinct[start : start + batch_size]
        block = to_numpy(encode(batch))
        if block.ndim != 2 or len(block) != len(batch):
            raise ValueError(
                f"encode returned an array of shape {block.shape} for {len(batch)} texts; "
                f"it must return one row for each text, shape ({len(batch)}, d)."
            )
        blocks.append(block)
    row = {text: position for position, text in enumerate(distinct)}
    return np.concatenate(blocks)[[row[text] for text in texts]]
