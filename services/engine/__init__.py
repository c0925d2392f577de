"""Runs a model: scheduler, paged blocks, forward, sampler."""
