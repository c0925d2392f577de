"""Requests that wait because no engine of their model has a free slot.

admission.py         admits or queues a request; refuses one that cannot be answered in time
slots.py             slots that are promised and not yet used
fair_queue.py        the order of the queue: fair between tenants
tenant_counters.py   tokens served to each tenant
wait_estimate.py     how long a request will wait, and the time its answer needs
service_time.py      how long engines work on a request
drain_rate.py        how many requests end per second
"""
