"""Splits a chat model's answer into content, reasoning and tool calls.

profile.py      which parsers a model needs
tools.py        the tools of a request, checked
plan.py         everything that one chat needs: constraint, visible marks, parsers
constraint.py, call_format.py    tool_choice and response format as one constraint
stream.py       splits the messages of one stream
reasoning.py    separates reasoning from the answer
base.py and hermes.py, llama3.py, mistral.py, deepseek.py, dsml.py    one parser per call syntax
events.py       what parsers return
marks.py        finds marks in text that arrives in pieces
call_json.py    reads one call as a JSON object, character by character
"""
