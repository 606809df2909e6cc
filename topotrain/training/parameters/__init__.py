"""A model's parameters and gradients as flat buffers, on the host or on a device."""
