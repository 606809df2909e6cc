"""A server: staging, the decision of a step, the update, and replies to pulls."""
