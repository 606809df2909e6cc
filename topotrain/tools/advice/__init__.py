"""Choose a layout: rehearse the candidates, say which is the fastest and why."""
