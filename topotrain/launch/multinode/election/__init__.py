"""The election of the unit that leads, and what its successor has to know."""
