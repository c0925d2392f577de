"""Marks for tests that need what not every processor has."""

import pytest
import torch

needs_vnni = pytest.mark.skipif(
    not torch.cpu._is_vnni_supported(),
    reason="dtype=int8 is refused on this CPU: without VNNI its integer product overflows",
)
