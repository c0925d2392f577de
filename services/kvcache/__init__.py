"""Which engine holds which reusable block, over Redis."""
