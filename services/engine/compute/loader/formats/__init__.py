"""Decodes quantised weights of Hugging Face folders, a range of rows at a time, to float32.

layouts.py   which stored tensors make up which weight
scaled.py    FP8, INT8 and 4-bit floats with scales
mxfp4.py     gpt_oss's stacks of experts
words.py     whole numbers in int32 words: GPTQ, AWQ, compressed-tensors
"""
