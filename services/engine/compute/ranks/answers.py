"""Messages from a rank to rank 0 while it joins. Later it sends none: a failure ends the rank."""

import msgspec


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """First message: the rank's weights are in memory."""

    weights_bytes: int


class Joined(msgspec.Struct, tag=True, frozen=True):
    """Second and last message: the rank is connected to all others and needs the store no more."""


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """First and only message of a rank that cannot read the model."""

    message: str


Answer = Loaded | LoadFailed | Joined
