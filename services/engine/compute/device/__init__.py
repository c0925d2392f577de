"""The seam between a runner and the machine that computes: memory, copies, streams, graphs.

interface.py   `Device`, and what copies and graphs are
cpu.py         the host itself: copies are at once, a graph runs its function again
cuda.py        a GPU: pinned memory, a side stream, events, CUDA graphs
rehearsal.py   a GPU that is not there: shapes without memory; a wait that is not allowed raises
indexing.py    what the rehearsal needs in torch's builds for CPUs
"""
