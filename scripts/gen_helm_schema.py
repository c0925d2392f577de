"""Put the services' own keys into the chart's values.schema.json; `--check` only compares.

`gateway.config`, `balancer.config`, `kvcache.config` and the engines' `config` then accept exactly
the keys of the dataclasses, with their bounds, and Helm refuses a misspelt one by its name. The
rest of the schema is written by hand and left as it is.
"""

import dataclasses
import importlib
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from services.common.config.redis_keys import RedisKeys
from services.common.config.service_config import ServiceConfig
from services.common.etcd.config import EtcdKeys

SCHEMA = Path(__file__).parent.parent / "helm" / "inferfleet" / "values.schema.json"
SERVICES = {
    "gateway": ("services.gateway.config", "GatewayConfig"),
    "balancer": ("services.balancer.config", "BalancerConfig"),
    "kvcache": ("services.kvcache.config", "KvCacheConfig"),
    "engine": ("services.engine.front.config", "FrontConfig"),
}
_ETCD = {field.name for field in dataclasses.fields(EtcdKeys)}
_REDIS = {field.name for field in dataclasses.fields(RedisKeys)}
# Keys that the chart itself sets: those of every service, and these.
WIRED = {
    "gateway": {"http_port", "engines", "balancers", "api_keys_file"} | _ETCD | _REDIS,
    "balancer": {"balancer_id", "kvcache", "admin_port"} | _ETCD,
    "kvcache": {
        "redis",
        "redis_password_file",
        "redis_sentinel_password_file",
        "redis_tls_ca_file",
        "redis_tls_cert_file",
        "redis_tls_key_file",
    },
    "engine": {
        "model",
        "served_name",
        "device",
        "engine_id",
        "kvcache",
        "public",
        "public_port",
        "standby_file",
    }
    | _ETCD,
}
_TYPES = {bool: "boolean", int: "integer", float: "number"}


def config_class(service: str) -> type[Any]:
    """The dataclass with a service's keys."""
    module, name = SERVICES[service]
    found: type[Any] = getattr(importlib.import_module(module), name)
    return found


def free_keys(service: str) -> dict[str, dict[str, Any]]:
    """JSON schema of each key that an operator may set under `config`."""
    cls = config_class(service)
    wired = WIRED[service] | {field.name for field in dataclasses.fields(ServiceConfig)}
    hints = typing.get_type_hints(cls)
    fields = (field for field in dataclasses.fields(cls) if field.name not in wired)
    return {field.name: _schema_of(hints[field.name], field.metadata) for field in fields}


def _schema_of(hint: Any, meta: typing.Mapping[str, Any]) -> dict[str, Any]:
    text = meta["help"] + (f" [{meta['unit']}]" if meta["unit"] else "")
    schema: dict[str, Any] = {"description": text}
    if isinstance(hint, types.UnionType):
        hint = next(inner for inner in typing.get_args(hint) if inner is not type(None))
    if typing.get_origin(hint) is tuple:
        schema |= {"type": "array", "items": {"type": "string"}}
    elif hint in _TYPES:
        schema["type"] = _TYPES[hint]
    elif meta["choices"]:
        schema["enum"] = list(meta["choices"])
    else:
        schema["type"] = ["string", "number"]  # kv_memory: 0.9 is as good as "0.9"
    for bound, name in (("low", "minimum"), ("high", "maximum")):
        if meta[bound] is not None:
            schema[name] = meta[bound]
    return schema


def updated(text: str) -> str:
    """The schema's text with the generated definitions in place."""
    schema = json.loads(text)
    for service in SERVICES:
        schema["definitions"][f"{service}Config"] = {
            "description": f"Keys of `python -m services.{service} --help`; generated.",
            "type": "object",
            "additionalProperties": False,
            "properties": free_keys(service),
        }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Rewrite the file, or with --check return 1 if it would change."""
    now = SCHEMA.read_text()
    wanted = updated(now)
    if sys.argv[1:] == ["--check"]:
        if now != wanted:
            print("values.schema.json is stale: run python scripts/gen_helm_schema.py")
        return int(now != wanted)
    SCHEMA.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
