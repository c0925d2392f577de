"""The meaning of an HTTP body, in the terms of the fleet's own contract."""

from dataclasses import dataclass

from inferfleet_proto.v1 import inference_pb2


@dataclass(frozen=True)
class ParsedBody:
    """One request per prompt, and the form of the answer."""

    requests: tuple[inference_pb2.GenerateRequest, ...]
    stream: bool
    include_usage: bool
    logprobs: bool

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        sampling = self.requests[0].sampling
        return sampling.n if sampling.HasField("n") else 1

    @property
    def model(self) -> str:
        """The model as the client named it."""
        return self.requests[0].model
