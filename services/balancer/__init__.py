"""Routes each request to an engine and fails over."""
