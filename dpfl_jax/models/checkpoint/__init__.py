"""Checkpoints in the Hugging Face layout, of GPT-2, Llama, Mistral, Qwen, Phi and Gemma families.

Reads (by slices) and writes directories with config.json and safetensors files. Nothing is
unpickled, executed or downloaded.
"""

from dpfl_jax.models.checkpoint.convert import (
    describe,
    fingerprint,
    load_checkpoint,
    load_model,
    read_config,
    save_adapter,
    save_checkpoint,
)
from dpfl_jax.models.checkpoint.files import checkpoint_dir, tokenizer_file

__all__ = [
    "load_checkpoint",
    "load_model",
    "save_checkpoint",
    "save_adapter",
    "read_config",
    "checkpoint_dir",
    "tokenizer_file",
    "describe",
    "fingerprint",
]
