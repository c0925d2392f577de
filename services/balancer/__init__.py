"""The balancer: routes each request to an engine, and resumes its stream if that engine fails.

service.py         puts the parts together; config.py: the options
request/           one request from arrival to end, on every engine that it runs on
queue/             waits for a free slot: fairness, priorities, estimates
routing/           prefix match, the policies, the log of decisions
engines/           the engines of the fleet: registry, state, loads, breakers
fleet_servicer.py  the operators' service
metrics.py         the metrics
"""
