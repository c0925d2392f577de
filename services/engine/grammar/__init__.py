"""Structured output: schema check, killable compiler, matchers."""
