"""The balancer: routes each request to an engine, and resumes its stream if that engine fails."""
