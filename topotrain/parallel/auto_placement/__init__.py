"""Automatic placement; nothing but `api.automatic_placement` imports it."""
