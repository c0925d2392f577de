"""Every served architecture against its reference, on tiny random models: `python -m tests.parity`.

cases.py     the models and their golden data; add a case here
measure.py   runs a case by every path, and compares
__main__.py  prints the table that docs/models.md holds
"""
