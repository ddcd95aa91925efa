"""Promises about messages: what is kept, and for how long."""
