"""The whole way of a message in one process."""
