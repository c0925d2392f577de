"""Structured output: checks constraints, compiles grammars in a process of their own, masks tokens.

constraint_check.py    the front's check of a constraint, before the request is queued
schema_check.py        JSON schemas; disjoint.py, finite.py, schema_form.py: its parts
regex_check.py         regular expressions
tag_check.py           structural tags; tag_format.py: a tag as the compiler takes it
structured_output.py   compiles in the background, for the core
compiler.py            the core's side of the compiler process; compiler_main.py: the process
wire.py                the messages between the two
library.py             imports xgrammar without what the engine does not need
so_matcher.py          one sequence's state in its grammar, and the token ids that may follow
vocabulary.py          the bytes of each token; utf8.py: tokens that would break a character
"""
