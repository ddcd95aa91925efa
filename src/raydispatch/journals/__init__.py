"""Journals that last: one file of SQLite, or a stream of NATS JetStream."""
