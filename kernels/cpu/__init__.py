"""The fast CPU path, in torch operators alone (no compiler at run time)."""
