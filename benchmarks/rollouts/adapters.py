"""Random adapters of the default model."""

from __future__ import annotations

from pathlib import Path

MODEL = "smollm2-135m"


def save_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of rank 16 on all linear layers, small enough to leave the model's text a text."""
    import torch

    from art_backend import AdapterConfig
    from art_backend.adapter_files import adapter_parameters, attach_adapter
    from art_backend.adapter_files import save_adapter as save
    from art_backend.base_model import load_model, resolve

    adapter = attach_adapter(load_model(resolve(MODEL)), MODEL, AdapterConfig(r=16, alpha=32), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapter_parameters(adapter).items():
            if ".lora_B." in name:
                parameter.copy_(0.001 * torch.randn(parameter.shape, generator=generator))
    save(folder, adapter)
    return folder
