"""The piecewise compiler: trace once, split, compile every piece, stitch, never look back."""
