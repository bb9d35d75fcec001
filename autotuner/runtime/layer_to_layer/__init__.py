"""Training layer after layer: parameters, gradients and state on the host, two layers' weights on the device."""
