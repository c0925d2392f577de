"""The `inferfleet` command. `generate` and `chat` need no services; most others do.

main.py            the entry point: one parser per command, errors as one line (errors.py)
up.py              runs a fleet; detach.py: in the background; down.py: stops it
demo.py            `make run`: a fleet, one question, its trace
generate.py        one prompt; chat.py: a conversation; gateway_client.py: their client
status.py          the processes and engines of a fleet; table.py: text tables
trace.py           where a request spent its time; waterfall.py: the drawing
placement/         expert placement      models/   revisions and aliases
tiny_model.py      writes a small model with random weights
etcd_action.py     what these two share
supervisor/        starts and watches the processes of a local fleet
"""
