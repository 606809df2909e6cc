"""Caffe2's data_parallel_model."""
