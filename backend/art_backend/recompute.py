"""Activation checkpointing (arXiv:1604.06174): keep the input of each decoder layer, compute the rest of it once more in the
backward pass. It costs a second forward pass and leaves the gradient as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def decoder_layers(decoder: Any) -> list[torch.nn.Module]:
    """The layers of a Transformers decoder; none where it does not keep them as `layers`."""
    return list(getattr(decoder, "layers", ()))


@contextmanager
def recomputed(decoder: Any, on: bool = True) -> Iterator[None]:
    """Forward passes inside keep no activations within the layers of `decoder`. The backward pass may come later.

    Transformers' own switch has no effect here: it asks for training mode, and the model stays in eval mode.
    """
    layers = decoder_layers(decoder) if on else []
    own = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        again = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)  # nothing is random
        layer.__dict__["forward"] = again  # shadows the class's method
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            if forward is None:
                del layer.__dict__["forward"]
            else:
                layer.__dict__["forward"] = forward


class KeptBytes(torch.autograd.graph.saved_tensors_hooks):
    """Adds up the bytes that autograd keeps of the forward passes inside, beside the parameters of `model`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(self._keep, lambda tensor: tensor)
        self.total = 0
        self._known = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:  # what is kept stays where it is, so an address is a name
            self._known.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor.detach()
