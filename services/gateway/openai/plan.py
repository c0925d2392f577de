"""What an HTTP body asks for, in our own terms."""

from dataclasses import dataclass

from inferfleet_proto.v1 import inference_pb2


@dataclass(frozen=True)
class Plan:
    """One body: a request per prompt, and how the answer is to be given."""

    requests: tuple[inference_pb2.GenerateRequest, ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    echo: bool = False

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        sampling = self.requests[0].sampling
        return sampling.n if sampling.HasField("n") else 1

    @property
    def model(self) -> str:
        """As the client named it."""
        return self.requests[0].model
