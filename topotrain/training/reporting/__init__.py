"""The reports of a worker while it trains."""
