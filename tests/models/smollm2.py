"""The small real model of the tests as transformers has it, which cannot read the file by itself offline."""

from __future__ import annotations

import torch
from tests.models.checkpoints import smollm2_path
from transformers import LlamaConfig, LlamaForCausalLM

from kerf_runtime.models import read_model_config
from kerf_runtime.models.checkpoint import find_checkpoint
from kerf_runtime.models.llama.weights import halves_from_pairs
from kerf_runtime.models.sources import open_source


def transformers_model() -> LlamaForCausalLM:
    """transformers' Llama with the weights of the GGUF file, expanded to float32."""
    path = smollm2_path()
    config = read_model_config(path)
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                vocab_size=config.vocab_size,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=True,
            )
        )
    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    state = {}
    with open_source(find_checkpoint(path)) as source:
        for name in source.names():
            stem, layer = name.removesuffix(".weight"), ""
            if stem.startswith("blk."):
                _, index, stem = stem.split(".")
                layer = f"model.layers.{index}."
            tensor = source.read(name)
            if stem in heads:
                tensor = halves_from_pairs(tensor, heads[stem])
            state[f"{layer}{names[stem]}.weight"] = tensor
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    # Not a parameter, so not in the state: made anew on the CPU.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    return model.eval()
