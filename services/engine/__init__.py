"""The engine: serves one model. A folder names the process in which its files run.

front/         front process: gRPC, text, metrics; no torch
core/          core process: the round loop
scheduling/    core process: what runs next, in which blocks; no torch
grammar/       core process and a compiler process: structured output
compute/       core process and ranks: everything that imports torch
text/          front process: token ids → text
model_files/   both processes: configuration, tokenizer and template of a model; no torch
tiny_models/   the command's process: writes small models with random weights; no torch
eplb/          front process: expert placement
contract/      what these folders exchange
offline/       the caller's process: `LLM`, without gRPC
"""
