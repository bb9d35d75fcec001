"""Vendors of devices: from torch's name of a type, its version of HIP, and the facts of an environment."""

from autotuner.ir.device import recorded_vendor, vendor_of
from autotuner.ir.records import Environment


def test_torch_gives_two_vendors_one_type_and_hip_tells_them_apart() -> None:
    assert vendor_of("cuda", None) == "nvidia"
    assert vendor_of("cuda", "6.4.43482") == "amd"
    assert vendor_of("cpu", "6.4.43482") == "cpu"


def test_an_environment_without_a_fact_of_it_is_nvidias() -> None:
    assert Environment("cuda", "A", (("torch", "2"),)).vendor == "nvidia"
    assert Environment("cuda", "A", (("torch", "2"), ("vendor", "amd"))).vendor == "amd"
    assert recorded_vendor("cpu", {}) == "cpu"
