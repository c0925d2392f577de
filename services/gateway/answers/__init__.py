"""A chat model's answer taken apart: reasoning, text, calls of tools.

events.py       what a parser says
marks.py        text up to a mark, with the beginning of a mark held back
call_json.py    one call as a JSON object, character by character
reasoning.py    reasoning apart from the answer
hermes.py, llama3.py, mistral.py, deepseek.py, dsml.py     how families of models write calls
profile.py      which of these a model needs
constraint.py   tool_choice as a constraint on the output
stream.py       the messages of one stream, with their text taken apart
names.py        the parsers' names
"""
