"""Keys of the gRPC metadata that the fleet's services exchange."""

TOKEN_KEY = "inferfleet-fleet-token"
REQUEST_ID_KEY = "inferfleet-request-id"
ENGINE_ID_KEY = "inferfleet-engine-id"
TRACE_ID_KEY = "inferfleet-trace-id"
