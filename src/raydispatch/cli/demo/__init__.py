"""`raydispatch demo`: a small shop, so that one can see messages routed, failing, being refused, and counted."""
