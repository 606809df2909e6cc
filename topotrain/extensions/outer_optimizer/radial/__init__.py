"""Merging by radial-directional averages."""
