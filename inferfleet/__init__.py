"""The Python client of an inferfleet gateway, and the offline `LLM`.

    from inferfleet import Client
    with Client("127.0.0.1:50051") as client:
        for text in client.generate("Once upon a time", max_tokens=32).texts():
            print(text, end="")

Each name is imported on first use. The clients need grpcio and protobuf only; `LLM` and
`SamplingParams` need the engine, which the published wheel does not contain.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferfleet.aio import AsyncClient, AsyncStream
    from inferfleet.client import Client, Stream
    from inferfleet.errors import FieldViolation, InferfleetError
    from inferfleet.results import Completion, Delta, Finished, Model, Started, Summary

    # `Any`, because an import here would make every importer of this package load torch.
    LLM: Any
    SamplingParams: Any

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Completion",
    "Delta",
    "FieldViolation",
    "Finished",
    "InferfleetError",
    "Model",
    "SamplingParams",
    "Started",
    "Stream",
    "Summary",
    "__version__",
]

_HOMES = {
    "inferfleet.aio": ("AsyncClient", "AsyncStream"),
    "inferfleet.client": ("Client", "Stream"),
    "inferfleet.errors": ("FieldViolation", "InferfleetError"),
    "inferfleet.results": ("Completion", "Delta", "Finished", "Model", "Started", "Summary"),
    "services.engine.offline.llm": ("LLM",),
    "services.engine.contract.sampling_params": ("SamplingParams",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if home.startswith("services"):
            raise ImportError(
                f"{name} runs the engine in this process, and the module {error.name!r} is not "
                "installed: clone the repository and run `pip install -e '.[engine]'` there"
            ) from error
        raise
