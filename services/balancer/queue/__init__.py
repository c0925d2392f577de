"""Requests that wait because no engine of their model has a free slot.

admission.py                       admits or queues a request; refuses what cannot be in time
slots.py                           slots that are promised and not yet used
fair_queue.py                      the order of the queue: fair between tenants
wait_estimate.py, service_time.py, drain_rate.py   how long a request will wait and run
"""
