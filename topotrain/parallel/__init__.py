"""One model split over the workers of a group.

The forward is captured as a graph (`capture`). Every value of the graph gets a location (`program/layout_inference`).
Where a value is needed in another location, the program has an edge that moves it (`program`). All workers of a group
run the same program at once, each its own steps (`runtime`).
"""
