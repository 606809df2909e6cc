"""What a worker reports while it trains."""
