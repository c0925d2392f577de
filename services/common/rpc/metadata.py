"""Keys of the gRPC metadata that the fleet's services exchange."""

TOKEN_KEY = "inferfleet-fleet-token"
PROOF_KEY = "inferfleet-fleet-proof"
REQUEST_ID_KEY = "inferfleet-request-id"
ENGINE_ID_KEY = "inferfleet-engine-id"
TRACE_ID_KEY = "inferfleet-trace-id"
