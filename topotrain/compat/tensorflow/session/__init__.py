"""TensorFlow 1's Session: a client that drives a cluster."""
