"""The process of a service.

lifecycle.py      start, readiness, signals, drain, stop
background.py     tasks that run as long as the service
telemetry.py      traces and JSON logs; log_level.py: the level, changed while the process runs
metrics.py        /metrics, /healthz and /log-level over HTTP
probe.py          the health check of containers
advertise.py      the address that other processes are given
child_process.py  children that end with their parent
"""
