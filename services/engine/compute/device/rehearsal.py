"""`RehearsalDevice`: a GPU that is not there. Rounds run on it with shapes and without memory.

Under torch's FakeTensorMode tensors on `cuda` can be made anywhere. Mixing devices and reading a
value raise there already. `Discipline` adds what passes there and makes a round wait on a real
device: a copy between host and device, and an operator whose result's size depends on values. It
also records the sequence of what the round launches: Triton kernels and torch's operators.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from services.engine.compute.device.indexing import Indexing

_WAITS = frozenset(
    {
        "_local_scalar_dense",
        "bincount",
        "equal",
        "is_nonzero",
        "item",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
        "_unique2",
    }
)
"""Operators that read values on the host, by name."""
_NO_LAUNCH = frozenset(
    {
        "detach",
        "detach_",
        "device",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "_unsafe_view",
    }
)
"""Operators that launch nothing, beside views."""
_SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
}


class DisciplineError(RuntimeError):
    """The host would wait for the device, or a tensor is on the wrong side."""


class Discipline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises DisciplineError where a round waits; keeps the sequence of launches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[str] = []
        """One line each: name, then the tensors that it is given."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in _WAITS and any(tensor.device.type == "cuda" for tensor in given):
            raise DisciplineError(f"{name}: reads a value of the device, for which the host waits")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            _check_index(name, given)
        _check_sides(name, given, ())
        out = func(*args, **kwargs)
        _check_sides(name, given, [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        if given and not func.is_view and name not in _NO_LAUNCH:
            self.launches.append(f"{name} {' '.join(describe(tensor) for tensor in given)}")
        return out


def describe(tensor: Tensor) -> str:
    """Format and shape of a tensor, e.g. bf16[8, 2048]; strides where rows are not adjacent."""
    text = f"{_SHORT.get(tensor.dtype, str(tensor.dtype))}{list(tensor.shape)}"
    return text if tensor.is_contiguous() else f"{text} by {list(tensor.stride())}"


class RehearsedFetch:
    """See Fetch: zeros, for there are no values."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [(tensor.shape, tensor.dtype) for tensor in tensors]

    def wait(self) -> list[Tensor]:
        """See Fetch; it runs outside the modes of the rehearsal, or on fake tensors within."""
        return [torch.from_numpy(np.zeros(tuple(s), _NUMPY[d])) for s, d in self._shapes]


_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class RehearsalDevice:
    """See Device. Models are loaded under `loading`, rounds run under `running`."""

    place = torch.device("cuda", 0)
    captures = True

    def __init__(self, *, memory_bytes: int = 80 << 30) -> None:
        """
        Args:
            memory_bytes: memory that the device is taken to have free.
        """
        self._memory_bytes = memory_bytes
        self._fake = FakeTensorMode()
        self.discipline = Discipline()
        self.uploads: list[int] = []
        """Words of each copy to the device."""
        self.fetches: list[tuple[tuple[int, ...], ...]] = []
        """Shapes of the tensors of each copy to the host."""
        self.replays: list[RehearsedGraph] = []

    @property
    def name(self) -> str:
        """See Device."""
        return "rehearsal"

    @property
    def launches(self) -> list[str]:
        """What was launched since the last `clear`."""
        return self.discipline.launches

    def clear(self) -> None:
        """Forget launches and copies."""
        self.launches.clear()
        self.replays.clear()
        self.uploads.clear()
        self.fetches.clear()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Tensors are fake; copies and waits are allowed, and nothing is recorded."""
        with self._fake, Indexing():
            yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """As a round runs.

        Raises:
            DisciplineError: in the code that waits or copies.
            LaunchError: in the code that launches a kernel on the wrong tensors.
        """
        from kernels.triton.launch import Launch, recorded

        def report(made: Launch) -> None:
            for key, tensor in made.tensors:
                if tensor.device.type != self.place.type:
                    raise DisciplineError(f"{made.kernel}: {key} is on {tensor.device}")
            tensors = " ".join(f"{key}={describe(tensor)}" for key, tensor in made.tensors)
            self.launches.append(f"{made.kernel}{list(made.grid)} {tensors}")

        with recorded(report), self._fake, self.discipline, Indexing():
            yield

    def free_bytes(self) -> int:
        """See Device."""
        return self._memory_bytes

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """See Device; no memory is used, so none is measured."""
        work()
        return 0

    def upload(self, words: NDArray[np.int32], target: Tensor | None = None) -> Tensor:
        """See Device."""
        self.uploads.append(len(words))
        if target is None:
            return torch.empty(len(words), dtype=torch.int32, device=self.place)
        if target.shape != (len(words),) or target.dtype != torch.int32:
            raise DisciplineError(
                f"upload: {len(words)} words do not fit target {describe(target)}"
            )
        return target

    def fetch(self, tensors: Sequence[Tensor]) -> RehearsedFetch:
        """See Device."""
        self.fetches.append(tuple(tuple(tensor.shape) for tensor in tensors))
        return RehearsedFetch(tensors)

    def capture(self, run: Callable[[], None]) -> "RehearsedGraph":
        """See Device.

        Raises:
            DisciplineError: `run` copies something.
        """
        copies = len(self.uploads) + len(self.fetches)
        first = len(self.launches)
        run()
        if len(self.uploads) + len(self.fetches) != copies:
            raise DisciplineError("capture: a graph must not copy between host and device")
        return RehearsedGraph(self, self.launches[first:])


class RehearsedGraph:
    """See Graph: a replay is one launch, and what it launches is in `launches`."""

    def __init__(self, device: RehearsalDevice, launches: list[str]) -> None:
        self._device = device
        self.launches = tuple(launches)

    def replay(self) -> None:
        """See Graph."""
        self._device.launches.append("graph")
        self._device.replays.append(self)


def _check_index(name: str, given: Sequence[Tensor]) -> None:
    masks = [t for t in given[1:] if t.dtype in (torch.bool, torch.uint8)]
    if masks and given[0].dtype not in (torch.bool, torch.uint8):
        raise DisciplineError(
            f"{name}: a mask {describe(masks[0])} as an index; the host waits for the number of "
            "its ones: use where or masked_fill"
        )


def _check_sides(name: str, given: Sequence[Tensor], made: Sequence[Tensor]) -> None:
    """No tensor may change its side; numbers (no dimensions) on the host may be arguments."""
    before = {t.device.type for t in given if t.dim() or t.device.type == "cuda"}
    after = {t.device.type for t in made}
    numbers = any(t.dim() == 0 and t.device.type == "cpu" for t in given)
    moved = numbers and not before and "cuda" in after
    if len(before | after) > 1 or moved:
        tensors = ", ".join(f"{describe(t)} on {t.device.type}" for t in given)
        raise DisciplineError(
            f"{name}: {tensors} becomes a tensor on {', '.join(sorted(after))}: only Device.upload "
            "and Device.fetch may copy in a round"
        )
