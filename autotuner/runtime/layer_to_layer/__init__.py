"""Training layer after layer: parameters, gradients and optimizer state on the host, two layers' weights on the device."""
