"""A rank that holds experts: `python -m services.engine.compute.expert_parallel.rank_main --fd N`.

It runs rank 0's commands until rank 0 closes the channel.
"""

import torch

from kernels import dispatch
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.commands import (
    ApplyNext,
    BeginPlacement,
    Command,
    Join,
    PrepareNext,
    RunRound,
)
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.loader import load_model
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.weights import StoredWeights
from services.engine.compute.numerics import TORCH_DTYPES, use_threads
from services.engine.compute.ranks.answers import Joined, Loaded, LoadFailed
from services.engine.compute.ranks.channel import Channel
from services.engine.compute.ranks.groups import GlooGroup
from services.engine.compute.ranks.process import run_rank
from services.engine.contract.model_config import ModelFileError


@torch.inference_mode()
def serve(channel: Channel[Command]) -> None:
    """Join the other ranks, then run commands.

    Raises:
        ChannelClosedError: rank 0 closed the channel; the ordinary end.
        RunnerFailedError: another rank failed.
    """
    command = channel.next()
    assert isinstance(command, Join), "the first command must be Join"
    try:
        bank = _load(command)
    except ModelFileError as error:
        channel.send(LoadFailed(message=str(error)))
        return
    channel.send(Loaded(weights_bytes=bank.nbytes))
    group = GlooGroup(command.store_path, command.rank, command.shape.num_ranks)
    channel.send(Joined())
    window = 1  # not reported: rank 0 counts, since all rows come from it
    experts = Experts(bank, command.shape, group, window)
    while True:
        match channel.next():
            case RunRound():
                experts.serve_round()
            case BeginPlacement(placement=placement):
                experts.bank.start_placement(placement)
            case PrepareNext():
                experts.bank.prepare()
            case ApplyNext():
                experts.apply()


def _load(command: Join) -> ExpertBank:
    config = command.config
    use_threads(config)
    source = load_model(config.model, digest=False)
    device, dtype = torch.device("cpu"), TORCH_DTYPES[config.dtype]
    weights = ExpertWeights.find(source.config, source.weights, dtype, device)
    if isinstance(source.weights, StoredWeights):
        experts = {name for layer in weights.names for names in layer for name in names}
        source.weights.skip(name for name in source.weights if name not in experts)
    name = dispatch.choose("cpu", dtype=config.dtype, deterministic=config.deterministic)
    kernels = dispatch.load(name)
    return ExpertBank(weights, kernels, command.shape, command.rank, command.placement)


def main() -> None:
    """See ranks.process.run_rank."""
    run_rank(__doc__.splitlines()[0], Command, serve)


if __name__ == "__main__":
    main()
