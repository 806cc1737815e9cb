"""The Llama family: Llama 2 and 3, SmolLM2 and everything else that is a ``LlamaForCausalLM``."""
