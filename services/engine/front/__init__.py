"""The front process of an engine: gRPC, text, metrics. Uses asyncio; never imports torch.

service.py                          starts the core process and everything below; config.py
servicer.py, public_servicer.py     the internal and the public gRPC service
request_translation.py              a message → a checked request record
open_requests.py                    sends requests to the core and its outputs to their streams
request_stream.py                   one open request: core outputs → events for the client
metrics.py, spans.py                what /metrics and the trace show; request_times.py: its times
load_report.py, health.py           what the balancer and probes see of the engine
registration.py, kv_events.py       the engine's record in etcd; its blocks in the prefix index
placement_member.py                 follows the group's expert placement
"""
