"""What the summed loss of a batch is divided by, as one weight for each prediction.

The weights are those of the whole batch before it is cut into rows, so gradients of rows add up to that of the batch,
and no choice of rows changes it. A "call" is one reply of the model: what it sampled in one go.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from art_backend.trie import Ints


def prediction_weights(call: Ints, how: str, constant_length: int) -> NDArray[np.float64]:
    """The weight of each prediction (P).

    Args:
        call: number of the call that each prediction belongs to (P).
        how: `token`: the mean over all tokens, so a long call counts more (DAPO, arXiv:2503.14476). `call`: the mean over
            calls of the mean over their tokens, so a token of a long call counts less (GRPO, arXiv:2402.03300).
            `constant`: the sum over tokens divided by calls * `constant_length`; a token counts the same in every batch
            (Dr. GRPO, arXiv:2503.20783).
    """
    if how == "token":
        return np.full(len(call), 1 / max(1, len(call)))
    _, of_call, sizes = np.unique(call, return_inverse=True, return_counts=True)
    if how == "call":
        return 1 / (len(sizes) * sizes[of_call])
    return np.full(len(call), 1 / max(1, len(sizes) * constant_length))
