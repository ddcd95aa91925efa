"""Spark on Ray. For now: the Java that it will run on."""
