"""Simulated workers that train by themselves between rounds of an outer optimizer."""
