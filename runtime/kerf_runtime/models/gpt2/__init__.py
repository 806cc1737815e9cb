"""GPT-2 (Radford et al., 2019): its facts and its names of weights; the forward pass is that of ``models.gpt``."""
