"""Checkpoints, model code and tokenizers: from a path to something that computes logits.

    path -> checkpoint.find_checkpoint      which files, safetensors folder or GGUF
         -> describe.read_model_config      architecture facts, no torch
         -> registry                        the family that implements the architecture
         -> <family>/config, model, weights one folder per family
         -> loader.load_model               the module with its weights
         -> tokenizer.load_tokenizer        text to tokens and back, no torch

Importing this package imports no torch; ``load_model`` and ``LoadedModel`` do when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kerf_runtime.models.config import ModelConfig, RopeScaling
from kerf_runtime.models.describe import model_config_digest, read_model_config
from kerf_runtime.models.registry import supported_architectures
from kerf_runtime.models.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from kerf_runtime.models.loader import LoadedModel, load_model

__all__ = [
    "LoadedModel",
    "ModelConfig",
    "RopeScaling",
    "Tokenizer",
    "load_model",
    "load_tokenizer",
    "model_config_digest",
    "read_model_config",
    "supported_architectures",
]


def __getattr__(name: str) -> Any:
    """Import the torch half on first use, so that the HTTP process never pays for it."""
    if name in ("LoadedModel", "load_model"):
        from kerf_runtime.models import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
