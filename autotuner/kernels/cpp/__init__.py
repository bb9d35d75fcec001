"""Own CPU kernels in C++, compiled for the machine that runs them; the rules are in `autotuner.kernels.rules.cpp`."""
