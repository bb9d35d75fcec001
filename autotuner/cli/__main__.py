"""`python -m autotuner.cli` is `autotuner`."""

from autotuner.cli.program import main

if __name__ == "__main__":
    main()
