"""Custom operators.  Importing a module here registers its operators with PyTorch."""
