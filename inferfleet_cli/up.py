"""`inferfleet up`: runs a whole fleet on this machine until Ctrl-C or `inferfleet down`."""

import argparse
import asyncio
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor import state_dir
from inferfleet_cli.supervisor.options import DRAIN_GRACE_S, REPOSITORY, Options, threads_per_engine
from inferfleet_cli.supervisor.other_process import wait_ended
from inferfleet_cli.tiny_model import PREFIX, tiny_model_in

if TYPE_CHECKING:
    from inferfleet_cli.supervisor.fleet import Fleet

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

EXAMPLES = """\
examples:
  inferfleet up                                  two engines with the small default model
  inferfleet up --engines 1 --dtype bfloat16 --model ~/models/Qwen3-0.6B
  inferfleet up --model tiny:qwen3-moe           random weights, written at once
  inferfleet up --set engine.max_num_seqs=8 --set balancer.policy=round_robin
  inferfleet up --gateways 2 --balancers 2 --redis redis://cache:6379/0 --etcd etcd:2379
  inferfleet up --detach && inferfleet status && inferfleet down

`python -m services.engine --help` lists the keys of a service (engine, gateway, balancer, kvcache).
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "up",
        help="start a whole fleet on this machine",
        description="Start Redis, etcd, the KV-cache service, a balancer, engines and a gateway,\n"
        "restart processes that fail, and keep recent traces for `inferfleet trace`.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_fleet_options(parser)
    parser.add_argument(
        "--detach",
        action="store_true",
        help="run in the background, and return when the fleet serves; `down` stops it",
    )
    parser.add_argument(
        "--end-with",
        type=int,
        metavar="PID",
        help="stop the fleet when the process PID ends, however it ends; for scripts and tests",
    )
    parser.add_argument(
        "--in-background", dest="detached", action="store_true", help=argparse.SUPPRESS
    )
    parser.set_defaults(run=run)


def add_fleet_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `up` and `demo` share."""
    parser.add_argument(
        "--engines", type=int, default=2, metavar="N", help="number of engines (default 2)"
    )
    for kind in ("gateways", "balancers"):
        parser.add_argument(
            f"--{kind}", type=int, default=1, metavar="N", help=f"number of {kind} (default 1)"
        )
    parser.add_argument(
        "--spare-engines",
        type=int,
        default=0,
        metavar="N",
        help="engines that stand by, loaded, for those that end (default 0)",
    )
    parser.add_argument(
        "--redis", default="", metavar="URL", help="use this Redis instead of starting one"
    )
    parser.add_argument(
        "--etcd",
        default="",
        metavar="HOST:PORT,…",
        help="use this etcd instead of starting one; https://host:port for TLS",
    )
    parser.add_argument(
        "--model",
        default="",
        metavar="PATH|NAME|tiny:ARCH",
        help="a folder, a .gguf file, a known model name, or tiny:ARCH for random weights",
    )
    parser.add_argument(
        "--dtype", default="float32", help="float32 (default), bfloat16, float16 or int8"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=50051,
        help="gRPC port of the gateway (default 50051; 0 means any free one)",
    )
    parser.add_argument(
        "--http-port",
        type=int,
        default=8080,
        help="HTTP port of the gateway (default 8080; 0 means any free one)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=DRAIN_GRACE_S,
        metavar="S",
        help="how long running streams may take when the fleet stops (default 10)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        dest="settings",
        metavar="SERVICE.KEY=VALUE",
        help="set a configuration key of a service (engine, engine-1, balancer, …); repeatable",
    )


def options_of(args: argparse.Namespace) -> Options:
    """Check the arguments and return the fleet's options.

    Raises:
        CliError: a value is invalid.
        ModuleNotFoundError: this installation does not contain the services.
    """
    for kind in ("engines", "gateways", "balancers"):
        count = getattr(args, kind)
        if not 1 <= count <= 64:
            raise CliError(f"--{kind}: must be between 1 and 64, got {count}", status=2)
    if not 0 <= args.spare_engines <= 8:
        raise CliError(f"--spare-engines: must be 0 to 8, got {args.spare_engines}", status=2)
    for flag, port in (("--port", args.port), ("--http-port", args.http_port)):
        if not 0 <= port <= 65535:
            raise CliError(f"{flag}: must be between 0 and 65535, got {port}", status=2)
    if not 0 <= args.grace <= 3600:
        raise CliError(f"--grace: must be between 0 and 3600, got {args.grace:g}", status=2)
    options = Options(
        state_dir=args.state_dir,
        engines=args.engines,
        model=_model_of(args.model, args.state_dir),
        dtype=args.dtype,
        port=args.port,
        http_port=args.http_port,
        grace_s=args.grace,
        settings=tuple(args.settings),
        gateways=args.gateways,
        balancers=args.balancers,
        spare_engines=args.spare_engines,
        redis=args.redis,
        etcd=args.etcd,
    )
    from inferfleet_cli.supervisor import preflight

    preflight.check(options, REPOSITORY)
    return options


def _model_of(model: str, state_dir: Path) -> str:
    """The option `model` of the engines: a path as they find it, or a known name."""
    if model.startswith(PREFIX):
        return tiny_model_in(state_dir, model)
    path = Path(model).expanduser()
    return str(path.absolute()) if model and path.exists() else model


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    if args.detach and not args.detached:
        from inferfleet_cli.detach import start_detached

        return start_detached(options.state_dir)

    async def serve(fleet: "Fleet") -> int:
        say(_serving_text(fleet) + ("" if args.detached else "\nCtrl-C stops the fleet."))
        await asyncio.Event().wait()
        return 0

    return asyncio.run(with_fleet(options, serve, end_with=args.end_with))


async def with_fleet(
    options: Options,
    body: Callable[["Fleet"], Awaitable[int]],
    *,
    end_with: int | None = None,
) -> int:
    """Start a fleet, run `body` on it, and stop the fleet; returns the status of `body`.

    A signal ends `body` early, also during the start; a second signal kills the services. The end
    of the process with the id `end_with` has the effect of a signal.

    Raises:
        CliError: the fleet cannot be started. Nothing is printed before the directory is claimed.
    """
    from inferfleet_cli.supervisor.fleet import Fleet

    fleet = Fleet(options, say)
    fleet.claim()
    threads = threads_per_engine(options.engines)
    plural = "" if options.engines == 1 else "s"
    say(f"Starting a fleet of {options.engines} engine{plural}, {threads} CPU thread(s) each")
    work = asyncio.ensure_future(_start_and(fleet, body))
    stop_requested = False

    def on_signal() -> None:
        nonlocal stop_requested
        if stop_requested or work.done():
            fleet.kill()
        stop_requested = True
        work.cancel()

    loop = asyncio.get_running_loop()
    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, on_signal)
    others = set() if end_with is None else {asyncio.ensure_future(wait_ended(end_with))}
    try:
        await asyncio.wait({work, *others}, return_when=asyncio.FIRST_COMPLETED)
        work.cancel()  # no effect if it is done
        await asyncio.wait({work})
    finally:
        for other in others:
            other.cancel()
        say("Stopping …")
        await fleet.stop()
        say("Stopped; no process is left")
    return 0 if work.cancelled() else work.result()


async def _start_and(fleet: "Fleet", body: Callable[["Fleet"], Awaitable[int]]) -> int:
    await fleet.start()
    return await body(fleet)


def _serving_text(fleet: "Fleet") -> str:
    at, root = fleet.addresses, fleet.options.state_dir
    assert at is not None
    return (
        f"\nServing\n  gRPC   {at.gateway}   (inferfleet.v1.Inference)\n"
        f"  HTTP   {fleet.http_url}/v1   (OpenAI-compatible)\n"
        f"  logs   {root}/logs\n"
        f'Try  inferfleet generate --chat "What is the capital of France?"{state_dir.flag(root)}'
    )


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


def _setting(text: str) -> tuple[str, str, str]:
    name, equals, value = text.partition("=")
    service, dot, key = name.partition(".")
    if not (equals and dot and service and key):
        raise argparse.ArgumentTypeError(f"expected SERVICE.KEY=VALUE, got {text!r}")
    return service, key, value
