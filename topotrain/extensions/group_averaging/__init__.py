"""Server groups that average: with a center, or with partners by chance."""
