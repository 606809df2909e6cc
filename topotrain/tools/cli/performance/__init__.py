"""Commands that measure, predict and choose a layout."""
