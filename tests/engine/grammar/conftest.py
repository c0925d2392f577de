"""One compiler for all tests of grammars: its process takes seconds to start."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.structured_output import Built, SOMatcher, SOMatcherBuilder
from services.engine.grammar.wire import Setup

END = 258
WaitFor = Callable[..., Built]


@pytest.fixture(scope="session")
def builder() -> Iterator[SOMatcherBuilder]:
    """Every byte is a token; id 258 ends, some of the ids above are padding."""
    made = SOMatcherBuilder(Setup("", 300, [END], 2 << 30), timeout_s=10)
    yield made
    made.close()


@pytest.fixture(scope="session")
def wait_for(builder: SOMatcherBuilder) -> WaitFor:
    """The outcome of a constraint; by another builder if one is given."""

    def wait(constraint: Constraint, key: str = "r", builder: SOMatcherBuilder = builder) -> Built:
        builder.submit(key, constraint)
        give_up = time.monotonic() + 120
        while time.monotonic() < give_up:
            for built in builder.pump():
                if built.request_key == key:
                    return built
            builder.wait(1)
        raise AssertionError("no grammar in 120 s")

    return wait


@pytest.fixture(scope="session")
def allows() -> Callable[[Built, str], bool]:
    """Whether a text is a whole answer."""

    def check(built: Built, text: str) -> bool:
        matcher = built.grammar.matcher()
        return all(matcher.accept(b) for b in text.encode()) and matcher.accept(END)

    return check


@pytest.fixture(scope="session")
def allowed_ids() -> Callable[[SOMatcher], set[int]]:
    """The ids that a matcher's mask allows."""

    def ids(matcher: SOMatcher) -> set[int]:
        assert matcher.mask is not None
        bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
        return set(bits.nonzero()[0].tolist())

    return ids
