"""What `import autotuner` offers."""

import subprocess
import sys

import autotuner
from autotuner.errors import AutotunerError, ConfigurationError
from autotuner.runtime import TunedWarning

NAMES = (
    "AutotunerError", "Client", "Configuration", "Limits", "Progress", "TuneOptions", "TunedWarning", "apply", "check",
    "load_configuration", "module", "optimize", "restore", "save_configuration", "summary", "tune",
)  # fmt: skip
OF_TORCH = (
    "batches", "clip_in_buckets", "compare_batches", "compare_ways", "layer_to_layer", "packed", "packed_attention",
    "packed_batches", "packed_bounds", "regions", "training_step",
)  # fmt: skip
"""Those that are imported with torch, whose models they are for."""


def test_every_name_is_listed_and_most_are_imported_without_torch() -> None:
    program = (
        f"import sys, autotuner; names = {NAMES + OF_TORCH}\n"
        "assert not [name for name in sys.modules if name.startswith('autotuner.')]\n"
        "assert set(names) <= set(dir(autotuner)) and sorted(autotuner.__all__) == sorted(names)\n"
        f"from autotuner import {', '.join(NAMES)}\n"
        "assert 'torch' not in sys.modules\n"
        f"from autotuner import {', '.join(OF_TORCH)}"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_what_is_offered_is_what_the_rooms_define() -> None:
    assert autotuner.TunedWarning is TunedWarning
    assert autotuner.AutotunerError is AutotunerError
    assert issubclass(ConfigurationError, autotuner.AutotunerError)
    assert autotuner.Limits(seconds=60).seconds == 60
    assert autotuner.Progress("done", 1, 1).stage == "done"
