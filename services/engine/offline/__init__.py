"""`LLM`: an engine in the caller's process, without gRPC.

llm.py           `LLM.generate`
llm_inputs.py    prompts and parameters → requests
outputs.py       results as the caller sees them
"""
