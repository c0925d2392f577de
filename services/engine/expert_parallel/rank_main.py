"""A rank that holds experts: `python -m services.engine.expert_parallel.rank_main --fd N`.

It does what rank 0 says until that one is gone. Whatever goes wrong ends the process: rank 0 sees
it, and the engine ends as a whole.
"""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys

import torch

from kernels import dispatch
from services.common import telemetry
from services.engine.child_process import die_with_parent
from services.engine.expert_parallel.bank import ExpertBank
from services.engine.expert_parallel.commands import (
    ApplyNext,
    BeginPlacement,
    Channel,
    ChannelClosedError,
    Join,
    Joined,
    Loaded,
    LoadFailed,
    PrepareNext,
    RunRound,
)
from services.engine.expert_parallel.experts import Experts
from services.engine.expert_parallel.groups import GlooGroup
from services.engine.known_models import find_model
from services.engine.loader.hf_folder import folder_config
from services.engine.loader.safetensors_folder import map_tensors, weight_files
from services.engine.models.config import ModelFileError
from services.engine.models.expert_weights import ExpertWeights, is_expert_name
from services.engine.numerics import TORCH_DTYPES, use_threads

log = logging.getLogger(__name__)


def serve(channel: Channel) -> None:
    """Join as told, then serve.

    Raises:
        ChannelClosedError: rank 0 is gone; the ordinary end.
        RunnerFailedError: another rank is gone.
    """
    command = channel.next_command()
    assert isinstance(command, Join), "the first command must be Join"
    try:
        bank = _load(command)
    except ModelFileError as error:
        channel.send(LoadFailed(message=str(error)))
        return
    channel.send(Loaded(weights_bytes=bank.nbytes))
    group = GlooGroup(command.store_path, command.rank, command.shape.num_ranks)
    channel.send(Joined())
    window = 1  # rank 0 counts: the rows are its own
    experts = Experts(bank, command.shape, group, window)
    while True:
        match channel.next_command():
            case RunRound():
                experts.serve_round()
            case BeginPlacement(placement=placement):
                experts.bank.begin(placement)
            case PrepareNext():
                experts.bank.prepare()
            case ApplyNext():
                experts.apply()


def _load(command: Join) -> ExpertBank:
    config = command.config
    use_threads(config)
    folder = find_model(config.model).path
    tensors = map_tensors(weight_files(folder), is_expert_name)
    device, dtype = torch.device("cpu"), TORCH_DTYPES[config.dtype]
    weights = ExpertWeights.find(folder_config(folder), tensors, dtype, device)
    name = dispatch.choose("cpu", dtype=config.dtype, deterministic=config.deterministic)
    kernels = dispatch.load(name)
    return ExpertBank(weights, kernels, command.shape, command.rank, command.placement)


def main() -> None:
    """Serve on an inherited socket; never returns, so that no thread can hold the exit up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to rank 0")
    args = parser.parse_args()
    die_with_parent()
    # A terminal or a supervisor signals the whole group; it is rank 0 that ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    telemetry.setup("engine", otlp_endpoint="", log_level="info")
    status = 0
    try:
        with contextlib.suppress(ChannelClosedError), torch.inference_mode():
            serve(Channel(socket.socket(fileno=args.fd)))
    except Exception:  # the edge: the others learn of it by this process's end
        log.exception("the expert rank cannot go on")
        status = 1
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
