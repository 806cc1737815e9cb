"""Layers that models are built from.

A layer with two forms, ATen for Inductor to fuse and a custom operator with its own kernel, is a
``CustomOp``; ``apply_policy`` chooses the forms of a whole model.  Linear layers are plain or FP8.
"""
