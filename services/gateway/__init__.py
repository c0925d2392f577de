"""The fleet's face: public gRPC and OpenAI-compatible HTTP."""
