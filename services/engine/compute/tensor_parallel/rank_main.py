"""A rank that holds a part of a model.

Run as `python -m services.engine.compute.tensor_parallel.rank_main --fd N`. It runs rank 0's
commands until rank 0 closes the channel.
"""

import torch

from services.common.config.settings import ConfigError
from services.engine.compute.loader import load_model
from services.engine.compute.model_runner import ModelRunner
from services.engine.compute.ranks.answers import Joined, Loaded, LoadFailed
from services.engine.compute.ranks.channel import Channel
from services.engine.compute.ranks.groups import join_group
from services.engine.compute.ranks.process import run_rank
from services.engine.compute.tensor_parallel.commands import (
    Allocate,
    Command,
    CopyBlocks,
    Forward,
    Join,
    Scrub,
)
from services.engine.compute.tensor_parallel.shard import Shard
from services.engine.contract.model_config import ModelFileError


@torch.inference_mode()
def serve(channel: Channel[Command]) -> None:
    """Load this rank's part and join the other ranks, then run commands.

    Raises:
        ChannelClosedError: rank 0 closed the channel; the ordinary end.
        RunnerFailedError: another rank failed.
    """
    join = channel.next()
    assert isinstance(join, Join), "the first command must be Join"
    size = join.config.tensor_parallel
    shard = Shard(join.rank, size)
    try:
        source = load_model(join.config.model, digest=False)
        runner = ModelRunner(join.config, source, partition=shard)
    except (ModelFileError, ConfigError) as error:
        channel.send(LoadFailed(message=str(error)))
        return
    channel.send(Loaded(weights_bytes=runner.describe().weights_bytes))
    shard.group = join_group(join.store_path, join.rank, size, runner.device)
    channel.send(Joined())
    while True:
        match channel.next():
            case Forward(batch=batch, previous_tokens=ids):
                tokens = None if ids is None else torch.tensor(ids, device=runner.device)
                runner.forward(batch, tokens)
            case CopyBlocks(pairs=pairs):
                runner.copy_blocks(pairs)
            case Allocate(num_blocks=num_blocks):
                runner.allocate(num_blocks)
            case Scrub():
                runner.scrub()


if __name__ == "__main__":
    run_rank(str(__doc__).splitlines()[0], Command, serve)
