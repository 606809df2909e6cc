"""One model over the workers of a group: placement, the cut graph, and its execution with send and receive put in.

A model's forward is captured as a graph (`capture`), every value of it gets a place (`infer`), and where a value is
needed in another place than where it is, a move stands between (`program`). All workers of a group run the same
program at once, each its own steps (`run`).
"""
