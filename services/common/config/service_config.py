"""Configuration keys that every service has; each service's configuration inherits from this."""

from dataclasses import dataclass

from services.common.config.settings import setting

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class ServiceConfig:
    """Where a service listens, how it authenticates, and where its telemetry goes."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "port of the gRPC service; 0 takes a free one", low=0, high=65535)
    metrics_port: int = setting(
        0, "port of /metrics and /healthz; 0 takes a free one", low=0, high=65535
    )
    advertise: str = setting("", "host:port that others reach this service at; default host:port")
    ready_file: str = setting(
        "",
        "written as JSON {service, address, metrics_address, pid} once the service is ready",
        written=True,
    )
    fleet_token_file: str = setting(
        "",
        "file with the token by which members of the fleet authenticate; empty: no token is needed",
    )
    trust_unproven: bool = setting(
        False,
        "send the fleet token to members that cannot prove that they know it; for the time of an "
        "upgrade from 0.2.0 or before, whose members cannot",
    )
    tls_ca_file: str = setting("", "CA that signs the fleet's certificates; empty: no TLS")
    tls_cert_file: str = setting("", "this service's certificate")
    tls_key_file: str = setting("", "key of tls_cert_file")
    otlp_endpoint: str = setting(
        "", "OTLP/gRPC collector for traces, e.g. http://127.0.0.1:4317; empty: none"
    )
    log_level: str = setting("info", "least severe level to log", choices=LOG_LEVELS)
    drain_grace_s: float = setting(
        30.0, "after SIGTERM, how long running streams may take", unit="seconds", low=0
    )
