"""Which dispatchers get a message: patterns, routes, and the frozen table that answers."""
