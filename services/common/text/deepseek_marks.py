"""Marks around the calls of DeepSeek V3, R1 and V3.1: special tokens of these models."""

LIST, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
