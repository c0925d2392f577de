"""The supervisor of a local fleet: starts its processes, restarts those that fail, stops all."""
