"""OPT (Zhang et al., 2022): its facts and its names of weights; the forward pass is that of ``models.gpt``."""
