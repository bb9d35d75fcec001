"""`python -m autotuner.cli` is `autotuner`."""

from autotuner.cli import main

if __name__ == "__main__":
    main()
