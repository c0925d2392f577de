"""Expert placement (EPLB): which expert slot holds which logical expert.

The algorithms, the group's records in etcd, the controller that writes maps and the watcher that
follows them. It does not balance requests between engines.
"""
