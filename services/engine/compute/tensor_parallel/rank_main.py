"""A rank that holds a part of a model.

Run as `python -m services.engine.compute.tensor_parallel.rank_main --fd N`.

It does what rank 0 says until that one is gone.
"""

import torch

from services.common.config.settings import ConfigError
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
    """Join as told, then serve.

    Raises:
        ChannelClosedError: rank 0 is gone; the ordinary end.
        RunnerFailedError: another rank is gone.
    """
    join = channel.next()
    assert isinstance(join, Join), "the first command must be Join"
    size = join.config.tensor_parallel
    shard = Shard(join.rank, size)
    try:
        runner = ModelRunner(join.config, shard=shard)
    except (ModelFileError, ConfigError) as error:
        channel.send(LoadFailed(message=str(error)))
        return
    channel.send(Loaded(weights_bytes=runner.describe().weights_bytes))
    shard.group = join_group(join.store_path, join.rank, size, runner.device)
    channel.send(Joined())
    while True:
        match channel.next():
            case Forward(batch=batch, drawn=drawn):
                tokens = None if drawn is None else torch.tensor(drawn, device=runner.device)
                runner.forward(batch, tokens)
            case CopyBlocks(pairs=pairs):
                runner.copy_blocks(pairs)
            case Allocate(num_blocks=num_blocks):
                runner.allocate(num_blocks)
            case Scrub():
                runner.scrub()


if __name__ == "__main__":
    run_rank(str(__doc__).splitlines()[0], Command, serve)
