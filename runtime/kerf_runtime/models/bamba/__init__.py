"""Bamba: a hybrid of attention layers and Mamba-2 layers (Dao and Gu, 2024) around the MLPs of a Llama."""
