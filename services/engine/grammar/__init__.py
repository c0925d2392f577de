"""Structured output: checks constraints, compiles grammars in a process of their own, masks tokens.

constraint_check.py    the front's check of a constraint, before the request is queued
schema_plan.py         which engine enforces a JSON schema: xgrammar, else llguidance
schema_normal.py       a schema in one dialect; schema_refs.py (`$ref`), schema_values.py
schema_simplify.py     a schema of enforceable keywords; its parts: exclusive.py (`oneOf`),
                       schema_negation.py (`not`), members.py (counts, `uniqueItems`), formats.py
schema_check.py        what xgrammar enforces; disjoint.py, finite.py, schema_form.py: its parts
strict_schema.py       what llguidance enforces; pattern_form.py: its syntax of patterns
schema_refused.py      the refusal, by the path of a keyword
regex_check.py         regular expressions
tag_check.py           structural tags; tag_format.py: a tag as the compiler takes it
structured_output.py   compiles in the background, for the core
compiler.py            the core's side of the compiler process; compiler_main.py: the process
wire.py                the messages between the two
library.py             imports xgrammar without what the engine does not need
so_matcher.py          one sequence's state in its grammar, and the token ids that may follow
strict_engine.py       the same for llguidance, and its compiler
vocabulary.py          the bytes of each token; utf8.py: tokens that would break a character
"""
