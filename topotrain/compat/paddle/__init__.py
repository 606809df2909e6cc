"""Paddle's pservers and trainers."""
