"""What travels: topics, envelopes, and batches of them."""
