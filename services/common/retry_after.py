"""The wait that a refused caller is advised to make before it tries again."""

UNKNOWN_S = 1.0
"""The advice while no request has ended yet, so no rate is known."""


def retry_after_s(
    requests_ahead: float, ended_per_s: float, *, at_least_s: float = 0.1, at_most_s: float = 60.0
) -> float:
    """Seconds until so many requests have ended, within bounds.

    Args:
        requests_ahead: requests that have to end first.
        ended_per_s: measured rate at which requests end (or leave the queue); 0 if unknown.
    """
    wait_s = requests_ahead / ended_per_s if ended_per_s > 0 else UNKNOWN_S
    return min(max(wait_s, at_least_s), at_most_s)
