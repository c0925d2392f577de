"""Buffers of a program whose layers have experts."""

import torch
from torch import Tensor

from kernels.compiled import job as j
from kernels.compiled.packing import whole_panels
from kernels.whole_rounds import DecoderShape


class ExpertBuffers:
    """Owns what the phases of `experts` write, and fills their fields of the job table."""

    def __init__(self, shape: DecoderShape, job: Tensor) -> None:
        """
        Args:
            shape: of a decoder with `routed`.
            job: the job table.
        """
        assert shape.routed is not None, "the decoder has no experts"
        routed = self._routed = shape.routed
        self._job = job
        self._narrow = whole_panels(max(shape.hidden, routed.intermediate))
        self._wide = whole_panels(max(shape.hidden, 2 * routed.intermediate))
        self.counts = torch.zeros(routed.layers, routed.experts, dtype=torch.int64)
        """[layers with experts, experts]: rows of each expert in the last round."""
        self._ends = torch.zeros(routed.experts, dtype=torch.int64)
        self._active = torch.zeros(routed.layers, 1 + routed.experts, dtype=torch.int64)
        values = {
            j.EXPERTS: routed.experts,
            j.TOP_K: routed.top_k,
            j.EXPERT_SIZE: routed.intermediate,
            j.RENORMALISE: int(routed.renormalise),
            j.COUNTS: self.counts.data_ptr(),
            j.ENDS: self._ends.data_ptr(),
            j.ACTIVE: self._active.data_ptr(),
        }
        for field, value in values.items():
            job[field] = value

    def grow(self, rows: int) -> None:
        """Make buffers for `rows` rows of the round."""
        job, top_k = self._job, self._routed.top_k
        places = rows * top_k
        self._chosen = torch.zeros(rows, top_k, dtype=torch.int64)
        self._gates = torch.zeros(rows, top_k)
        self._places = torch.zeros(rows, top_k, dtype=torch.int64)
        self._sources = torch.zeros(places, dtype=torch.int64)
        self._gathered = torch.zeros(places, self._narrow)
        self._scales = torch.zeros(places)
        self._corrections = torch.zeros(places, dtype=torch.int32)
        self._results = torch.zeros(places, self._wide)
        in_bytes = job[j.FORMAT] == j.BYTES
        self._bytes = torch.zeros(places if in_bytes else 1, self._narrow, dtype=torch.int8)
        job[j.GATHERED_STRIDE] = job[j.GATHERED_BYTES_STRIDE] = self._narrow
        job[j.GATHERED_WIDE_STRIDE] = self._wide
        tensors = {
            j.CHOSEN: self._chosen,
            j.GATES: self._gates,
            j.PLACES: self._places,
            j.SOURCES: self._sources,
            j.GATHERED: self._gathered,
            j.GATHERED_BYTES: self._bytes,
            j.GATHERED_SCALES: self._scales,
            j.GATHERED_CORRECTIONS: self._corrections,
            j.GATHERED_WIDE: self._results,
        }
        for field, tensor in tensors.items():
            job[field] = tensor.data_ptr()
