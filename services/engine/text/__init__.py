"""Token ids → text. Pure functions of the tokens, so a resumed stream gets the same text.

choice_stream.py    one choice: text, stop strings, log probabilities
detokenizer.py      bytes are held back until their character is complete
stop_strings.py     finds stop strings in text that arrives in pieces
"""
