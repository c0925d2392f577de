"""The supervisor of a local fleet: starts its processes, restarts those that fail, stops all.

fleet.py          the supervisor; child.py: one service, restarted with back-off
options.py        the options of a fleet and each service's command line; ports.py: free ports
preflight.py      checks the configuration before a process starts
stores.py         Redis and etcd of the fleet; dev_backends.py: where their servers come from
secured_etcd.py   that etcd demands a password; tls.py: the TLS files of a fleet
state_dir.py      the state directory; control.py: how commands reach the supervisor
spares.py         engines that stand by
engine_list.py    the engines as the balancer sees them; health.py: what each service reports
other_process.py  waits for a process that is not a child
otlp_receiver.py  receives traces; trace_store.py keeps them, trace_json.py prints them
"""
