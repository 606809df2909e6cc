"""Measuring one program on one machine, for `topotrain probe`: what a prediction of a layout needs to know."""
