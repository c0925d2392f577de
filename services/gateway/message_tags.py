"""Tells the kind of a serialised GenerateResponse from its first byte, without parsing it."""

DELTA_TAG = b"\x12"
"""First byte of a GenerateResponse whose event is a Delta: protobuf field 2, length-delimited."""
