"""Measuring one program on one machine, for `topotrain probe`."""
