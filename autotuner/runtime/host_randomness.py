"""States of the generators on the host, which a graph cannot advance."""

import random

import numpy as np
import torch


class HostRandomness:
    """The states of torch's, Python's and NumPy's generators when it was made."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore(self) -> bool:
        """Put the states back, and say whether anything was drawn."""
        numpy = np.random.get_state()
        drawn = (
            not torch.equal(self._torch, torch.get_rng_state())
            or self._python != random.getstate()
            or repr(numpy) != repr(self._numpy)
        )
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        return drawn
