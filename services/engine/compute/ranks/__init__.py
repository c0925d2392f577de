"""Processes that serve one engine together: how rank 0 tells them, how they exchange rows.

What they compute is expert_parallel's and tensor_parallel's business.
"""
