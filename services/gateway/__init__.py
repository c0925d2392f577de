"""The fleet's face: public gRPC and OpenAI-compatible HTTP.

door.py       from a caller's request to the one inside the fleet (enqueue at the door)
exchange.py   one request from arrival to end; both faces go through it
balancers.py  the stream to and from a balancer, as raw bytes
servicer.py   gRPC face        openai/   HTTP face
"""
