"""TensorFlow 1: ClusterSpec, Server and device placement."""
