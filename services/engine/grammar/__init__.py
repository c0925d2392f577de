"""Structured output: checks constraints, compiles grammars in a process of their own, masks tokens.

The front checks constraints (`constraint_check`); the core compiles them and matches tokens.
"""
