"""A whole fleet on one machine: starts it in order, keeps it running, leaves nothing behind."""
