"""Parameters that whole steps move together: where they lie, what is computed, and what is saved of them."""

import copy
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autotuner
from autotuner.ir.models import Model
from autotuner.runtime.bound_parameters import copied_buffers
from autotuner.runtime.joined_parameters import join_parameters
from autotuner.runtime.parameter_memory import JOINED_PARAMETERS
from tests.runtime.capture.known import Known
from tests.runtime.made_up_device import MadeUpDevice, instead_of_the_cpu

LAYERS = 2
PAIR = 2 * 16 * 32 * 4
"""Bytes of a layer's key and value weights, which the plan reads as one."""

pytestmark = pytest.mark.slow


class Joining:
    """What was joined, call by call."""

    def __init__(self) -> None:
        self.moved: list[int] = []
        self.given: list[tuple[Any, Any, Any]] = []

    def __call__(self, plan: Any, lying: Any, parameters: Any) -> int:
        self.moved.append(join_parameters(plan, lying, parameters))
        self.given.append((plan, lying, parameters))
        return self.moved[-1]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> MadeUpDevice:
    return instead_of_the_cpu(monkeypatch)


@pytest.fixture(autouse=True)
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    found = Joining()
    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: Known())
    monkeypatch.setattr("autotuner.api.backend.join_parameters", found)
    yield found
    torch._dynamo.reset()


def llama() -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).train()
    return model


def batch(number: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(number))
    return {"input_ids": ids, "labels": ids}


def trained(model: nn.Module, steps: int = 5) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = autotuner.training_step(model, optimizer, compiler="eager", watch=None)
    return [float(step(batch(number))) for number in range(steps)]


def pairs(model: Any) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return [(layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight) for layer in model.model.layers]


def test_a_whole_step_moves_what_its_plan_reads_as_one_and_computes_the_same_without_copies(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = trained(llama())
    assert joining.moved == []  # steps that are not captured leave parameters where they are
    instead_of_the_cpu(monkeypatch)
    model = llama()
    before = list(model.parameters())
    assert trained(model) == wanted
    assert joining.moved == [PAIR] * LAYERS
    assert [id(each) for each in model.parameters()] == [id(each) for each in before]
    assert all(value.data_ptr() == key.data_ptr() + key.nbytes for key, value in pairs(model))
    for _, lying, parameters in joining.given:
        assert copied_buffers(lying, parameters) == frozenset()


def test_where_a_further_shape_moves_parameters_graphs_of_others_are_captured_anew(
    device: MadeUpDevice, joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KnowsBatchesOfFour(Known):
        def find(self, models: Iterable[Model], device_type: str) -> list[Any]:
            found = super().find(models, device_type)
            return [each if each is not None and 4 in each.model.extents.values() else None for each in found]

    monkeypatch.setattr("autotuner.api.backend._knowledge", lambda _: KnowsBatchesOfFour())
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = autotuner.training_step(model, optimizer, compiler="eager", pad_batches=False, watch=None)
    few = {name: tensor[:3] for name, tensor in batch(0).items()}
    for _ in range(4):
        step(few)
    assert (device.captures, step.replays, joining.moved) == (1, 2, [])
    step(batch(1))
    assert joining.moved == [PAIR] * LAYERS
    step(few)
    assert (device.captures, step.replays) == (2, 3)


@pytest.mark.usefixtures("device")
def test_each_parameter_that_has_moved_is_saved_and_copied_by_itself(tmp_path: Path) -> None:
    model = llama()
    trained(model)
    state = model.state_dict()
    for key, value in pairs(model):
        assert key.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
        assert key.untyped_storage().nbytes() == key.nbytes
    save_model(model, str(tmp_path / "model"))
    save_file(state, tmp_path / "file")
    torch.save(state, tmp_path / "pickled")
    for saved in (load_file(tmp_path / "model"), load_file(tmp_path / "file"), torch.load(tmp_path / "pickled")):
        assert all(torch.equal(saved[name], value) for name, value in state.items())
    assert (tmp_path / "pickled").stat().st_size < 1.2 * sum(value.nbytes for value in state.values())
    again = copy.deepcopy(model)
    torch._dynamo.reset()
    assert trained(again) == trained(model)


@pytest.mark.usefixtures("device")
def test_a_parameter_that_shares_its_memory_stays_with_its_sibling(joining: Joining) -> None:
    wanted = trained(llama())
    joining.moved.clear()
    model = llama()
    key, _ = pairs(model)[0]
    seen = key.data[:1]
    at = key.data_ptr()
    assert trained(model) == wanted
    assert joining.moved == [0, PAIR]
    assert key.data_ptr() == at == seen.data_ptr()


@pytest.mark.usefixtures("device")
def test_memory_of_parameters_goes_with_the_last_of_them(joining: Joining) -> None:
    trained(llama())
    plan, lying, parameters = joining.given[0]
    own = [nn.Parameter(each.detach().clone()) for each in parameters]
    assert join_parameters(plan, lying, own) == PAIR
    joined = [place for place, each in enumerate(own) if each.data_ptr() in JOINED_PARAMETERS]
    whole = ref(JOINED_PARAMETERS[own[joined[0]].data_ptr()])
    assert {id(JOINED_PARAMETERS[own[place].data_ptr()]) for place in joined} == {id(whole())}
    del own[joined[0]]
    assert whole() is not None
    del own
    gc.collect()
    assert whole() is None
