"""Gradients: what a backward computes, what is sent, and what the script sees."""
