"""How a rank answers while it joins; afterwards it says nothing, and its end says all."""

import msgspec


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The first answer: its weights are in memory."""

    weights_bytes: int


class Joined(msgspec.Struct, tag=True, frozen=True):
    """The second and last answer: all ranks have met, and this one needs the store no more."""


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """The first and only answer of a rank that cannot serve."""

    message: str


Answer = Loaded | LoadFailed | Joined
