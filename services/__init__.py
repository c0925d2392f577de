"""The four services of a fleet, one folder each, and `common`: what at least two of them use.

The services never import one another. docs/architecture.md draws the processes.
"""
