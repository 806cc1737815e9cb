"""Decoders with learned positions, LayerNorm and a plain MLP: the code that OPT and GPT-2 share."""
