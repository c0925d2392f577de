"""Checks a fleet's configuration before any process starts: keys, values, files, model header.

The checks run in this process and load no tensors, because starting each service to check its
configuration would take seconds.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.options import Addresses, Options, keys_of
from services.balancer.config import BalancerConfig
from services.common.config.near_miss import meant
from services.common.config.settings import ConfigError, check_files, redacted, resolve
from services.engine.contract.model_config import ModelFileError
from services.engine.front.config import FrontConfig
from services.engine.model_files.gguf_config import gguf_config
from services.engine.model_files.gguf_header import read_header
from services.engine.model_files.hf_config import folder_config
from services.engine.model_files.known_models import find_model
from services.gateway.config import GatewayConfig
from services.kvcache.config import KvCacheConfig

CLASSES: Mapping[str, type[Any]] = {
    "engine": FrontConfig,
    "balancer": BalancerConfig,
    "kvcache": KvCacheConfig,
    "gateway": GatewayConfig,
}
_ANY_ADDRESS = "127.0.0.1:1"
_NO_FILE = Path(os.devnull)
"""Stands for the token and ready files, which exist only after the start."""


def check(options: Options, cwd: Path) -> None:
    """Resolve the configuration of every service as it would in `cwd`, and find the model.

    Raises:
        CliError: a service would reject its configuration; the status is 2.
    """
    names = options.names
    _check_settings(options, names)
    models = set()
    with contextlib.chdir(cwd):
        for name, config in configurations(options).items():
            kind = name.partition("-")[0]
            try:
                check_files(config)
            except ConfigError as error:
                raise CliError(f"{kind}: {error}", status=2) from error
            if isinstance(config, FrontConfig) and not config.simulate:
                models.add(config.model)
        for model in sorted(models):
            _check_model(model)


def configurations(options: Options) -> dict[str, Any]:
    """Each service's configuration, by its name; addresses are stand-ins.

    Raises:
        CliError: a service would reject its configuration; the status is 2.
    """
    names = options.names
    others = ("engines", "more_gateways", "more_balancers", "store_password_file")
    alike = [field.name for field in dataclasses.fields(Addresses) if field.name not in others]
    at = Addresses(
        engines=(_ANY_ADDRESS,) * options.engine_processes,
        more_gateways=((_ANY_ADDRESS,) * 2,) * (options.gateways - 1),
        more_balancers=((_ANY_ADDRESS,) * 2,) * (options.balancers - 1),
        **dict.fromkeys(alike, _ANY_ADDRESS),
    )
    found = {}
    for name, keys in keys_of(options, at, _NO_FILE, dict.fromkeys(names, _NO_FILE)).items():
        kind = name.partition("-")[0]
        flags = {key.replace("-", "_"): value for key, value in keys.items()}
        try:
            found[name] = resolve(CLASSES[kind], flags).config
        except ConfigError as error:
            raise CliError(f"{kind}: {error}", status=2) from error
    return found


def _check_settings(options: Options, names: list[str]) -> None:
    for service, key, value in options.settings:
        where = redacted(f"--set {service}.{key}={value}")
        if service not in (*CLASSES, *names):
            hint = meant(service, (*CLASSES, *names))
            raise CliError(f"{where}: {service}: no such service{hint}", status=2)
        known = [field.name for field in dataclasses.fields(CLASSES[service.partition("-")[0]])]
        if key.replace("-", "_") not in (*known, "config"):
            hint = meant(key.replace("-", "_"), known)
            raise CliError(f"{where}: {service}.{key}: no such key{hint}", status=2)


def _check_model(model: str) -> None:
    try:
        found = find_model(model)
        if found.path.is_file():
            gguf_config(read_header(found.path), found.path, None)
        else:
            folder_config(found.path)
    except (ModelFileError, OSError) as error:
        raise CliError(f"engine: {error}", status=2) from error
