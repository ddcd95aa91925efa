"""One message at one dispatcher: handler, breaker, retries, time limit, and the outcome."""
