"""A tuned layer is an ordinary module: its parameters and gradients are those that the framework makes."""

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

import autotuner
from autotuner.errors import ConfigurationError
from autotuner.runtime import TunedModule, TunedWarning, apply, restore
from autotuner.runtime.framework import encoder_layer
from tests.runtime.kinds import KINDS, interleaved, pair
from tests.runtime.layers import CUDA, assert_equal, batch, gradients
from tests.runtime.plans import configuration, model

pytestmark = pytest.mark.slow

STEPS = 3
kinds = pytest.mark.parametrize("kind", KINDS)

OPTIMIZERS = [f"{kind} {how}" for kind in ("SGD", "Adam", "AdamW", "Adagrad") for how in ("plain", "foreach", "fused")]

CAPTURABLE = ["Adam capturable", "AdamW capturable"]
ON_CUDA = [*(name for name in OPTIMIZERS if name != "Adagrad fused"), *CAPTURABLE]  # that one is the CPU's alone


def optimizer_of(module: nn.Module, name: str) -> torch.optim.Optimizer:
    kind, how = name.split()
    options: dict[str, Any] = {} if how == "plain" else {how: True}
    if kind == "SGD":
        options["momentum"] = 0.9
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.05, **options)
    return made


def step(module: nn.Module, optimizer: torch.optim.Optimizer, number: int, device: str = "cpu") -> None:
    optimizer.zero_grad()
    module(batch(number).to(device)).square().mean().backward()
    optimizer.step()


def assert_same_parameters(module: nn.Module, twin: nn.Module) -> None:
    for (name, one), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8, msg=name)


@contextmanager
def falls_back() -> Iterator[None]:
    with pytest.warns(TunedWarning, match="the original .* runs, not the configuration"):
        yield


@kinds
def test_parameters_are_the_same_objects_in_the_same_memory_and_gradients_are_contiguous(kind: str) -> None:
    layer, _ = pair(kind)
    plain = restore(layer)
    before = [(parameter, parameter.data_ptr()) for parameter in plain.parameters()]
    for number in range(STEPS):
        layer(batch(number)).sum().backward()
        assert [(parameter, parameter.data_ptr()) for parameter in layer.parameters()] == before
        assert all(parameter.is_contiguous() for parameter in layer.parameters())
        assert all(p.grad is not None and p.grad.is_contiguous() for p in layer.parameters())
    assert layer.calls == STEPS


@kinds
@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in OPTIMIZERS),
        *(pytest.param(name, CUDA, marks=pytest.mark.gpu) for name in ON_CUDA),
    ],
)
def test_optimizers_train_as_with_the_framework(kind: str, name: str, device: str) -> None:
    pairs = [(module, optimizer_of(module, name)) for module in pair(kind, device=device)]
    for number in range(STEPS):
        for module, optimizer in pairs:
            step(module, optimizer, number, device)
        assert_same_parameters(*(module for module, _ in pairs))


@kinds
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_goes_from_untuned_to_tuned_and_back(kind: str, name: str) -> None:
    tuned, twin = pair(kind)
    layer = restore(tuned)
    optimizers = [optimizer_of(module, name) for module in (layer, twin)]
    running: list[nn.Module] = [layer, tuned, layer, tuned]
    for number, module in enumerate(running):
        step(module, optimizers[0], number)
        step(twin, optimizers[1], number)
        loaded = optimizer_of(layer, name)
        loaded.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        optimizers[0] = loaded
        assert_same_parameters(layer, twin)
    assert tuned.calls == 2


@kinds
def test_gradients_that_were_set_by_hand_are_added_to(kind: str) -> None:
    made = pair(kind)
    for module in made:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        module(batch()).square().mean().backward()
        optimizer.step()
    assert_same_parameters(*made)


@kinds
def test_an_average_of_weights_follows(kind: str) -> None:
    made = pair(kind)
    averages = []
    for module in made:
        average = torch.optim.swa_utils.AveragedModel(
            module,
            multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5),  # type: ignore[no-untyped-call]
        )
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        for number in range(STEPS):
            step(module, optimizer, number)
            average.update_parameters(module)
        averages.append(average)
    torch.testing.assert_close(averages[0](batch()), averages[1](batch()), rtol=1e-10, atol=1e-10)
    assert_same_parameters(*averages)


@kinds
def test_lbfgs_and_vectors_of_parameters_work(kind: str) -> None:
    made = pair(kind)
    for module in made:
        optimizer: Any = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

        def closure(module: nn.Module = module, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = module(batch()).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        vector_to_parameters(parameters_to_vector(module.parameters()) * 0.5, module.parameters())
        assert all(p.grad is not None and p.grad.view(-1).numel() == p.numel() for p in module.parameters())
    assert_same_parameters(*made)


@kinds
def test_safetensors_take_and_give_the_parameters(kind: str, tmp_path: Path) -> None:
    torchs = pytest.importorskip("safetensors.torch")
    layer, twin = pair(kind)
    layer(batch()).sum().backward()
    torchs.save_file(layer.state_dict(), tmp_path / "one.safetensors")
    torchs.save_model(layer, str(tmp_path / "two.safetensors"))
    for name in ("one", "two"):
        found = torchs.load_file(tmp_path / f"{name}.safetensors")
        assert found.keys() == twin.state_dict().keys()
        assert all(torch.equal(found[key], value) for key, value in twin.state_dict().items())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    torchs.load_model(layer, str(tmp_path / "two.safetensors"))
    assert_equal(gradients(layer, batch()), gradients(twin, batch()))


def test_a_model_of_the_library_with_tuned_layers_is_saved_and_loaded(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=8, num_attention_heads=2, intermediate_size=12, num_hidden_layers=2, vocab_size=11,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, layer_norm_eps=1e-5,
    )  # fmt: skip
    whole: Any = BertModel(config, add_pooling_layer=False).double()
    for number in range(2):
        whole.encoder.layer[number] = apply(whole.encoder.layer[number], interleaved())
    words = torch.arange(12).view(2, 6) % 11
    wanted = whole(words).last_hidden_state
    whole.save_pretrained(tmp_path)
    found = BertModel.from_pretrained(tmp_path, add_pooling_layer=False, dtype=torch.float64)
    torch.testing.assert_close(found.train()(words).last_hidden_state, wanted, rtol=1e-10, atol=1e-10)


@kinds
def test_parameters_that_are_views_of_a_flat_buffer_follow_its_owner(kind: str) -> None:
    _, twin = pair(kind)
    flat = parameters_to_vector(twin.parameters()).detach().clone()
    layer = copy.deepcopy(twin)
    offset = 0
    for parameter in layer.parameters():
        parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
        offset += parameter.numel()
    tuned = apply(layer, interleaved())
    for factor in (1.0, 0.5, 2.0):
        flat.mul_(factor)
        vector_to_parameters(flat, twin.parameters())
        assert_equal(gradients(tuned, batch()), gradients(twin, batch()))


def test_parameters_that_move_between_forward_and_backward_are_followed() -> None:
    layer, twin = pair("encoder")
    for number in range(STEPS):
        x, twins = (batch(number).requires_grad_() for _ in range(2))
        y = layer(x)
        before = [parameter.data_ptr() for parameter in layer.parameters()]
        for parameter in layer.parameters():  # as FSDP does: freed behind forward, gathered again before backward
            storage, values = parameter.untyped_storage(), parameter.detach().clone()
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(parameter), torch.no_grad():
                size = storage.nbytes()
                storage.resize_(0)
                keep = torch.empty(size, dtype=torch.uint8)
                storage.resize_(size)
                parameter.copy_(values)
                del keep
        assert before != [parameter.data_ptr() for parameter in layer.parameters()]
        y.square().sum().backward()
        twin(twins).square().sum().backward()
        torch.testing.assert_close(x.grad, twins.grad, rtol=1e-10, atol=1e-10)
    assert layer.calls == STEPS


def test_rows_cut_off_parameters_are_noticed() -> None:
    layer, twin = pair("encoder")
    for module in (layer, twin):
        for name, cut in (("linear1.weight", slice(5)), ("linear1.bias", slice(5))):
            module.get_parameter(name).data = module.get_parameter(name).data[cut]
        module.get_parameter("linear2.weight").data = module.get_parameter("linear2.weight").data[:, :5]
    with falls_back():
        torch.testing.assert_close(layer(batch()), twin(batch()))
    assert layer.fallbacks == {"parameters": 1}


@kinds
def test_a_parameter_that_took_over_anothers_memory_is_the_one_that_is_read(kind: str) -> None:
    layer, twin = pair(kind)
    name = "linear1.weight" if "encoder" in kind else "attention.self.key.weight"
    path, _, last = name.rpartition(".")
    held = []
    for step in range(2):
        old = layer.get_parameter(name)
        setattr(layer.get_submodule(path), last, nn.Parameter(old.data))
        old.data = torch.randn_like(old)
        held.append(layer(batch(step)))  # two forwards wait for their backward, so the second one has new memory
    torch.testing.assert_close(held[1], twin(batch(1)), rtol=1e-10, atol=1e-10)


def test_a_layer_that_was_converted_or_moved_lets_go_of_its_old_memory() -> None:
    layer, _ = pair("bert")
    layer(batch())
    before = [ref(parameter.untyped_storage()) for parameter in layer.parameters()]
    (binding,) = layer._bindings
    layer.float()
    with falls_back():
        layer(batch(dtype=torch.float32))
    assert not hasattr(binding, "pool")
    assert before
    layer.double()
    layer(batch())
    assert layer.calls == 2


def test_a_second_derivative_after_the_mode_has_changed_is_that_of_the_forward_that_ran() -> None:
    layer = encoder_layer(model(p=0.3))
    twin = copy.deepcopy(layer).eval()
    made: Any = apply(layer, [configuration(model(p=0.3)), configuration(model())])
    found = []
    for module in (made.eval(), twin):
        x = batch().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # the framework's flash attention has no second derivative
            y = module(x).square()
        module.train()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found.append(torch.autograd.grad(grad.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert made.calls == 1


def test_attention_that_was_replaced_runs_as_the_framework_runs_it() -> None:
    class Doubled(nn.Module):
        batch_first, in_proj_bias = True, None

        def forward(self, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
            return 2 * x, None

    layer, twin = pair("encoder")
    for module in (layer, twin):
        module.self_attn = Doubled()
    with falls_back():
        torch.testing.assert_close(layer(batch()), twin(batch()))
    assert layer.fallbacks == {"parts": 1}


def test_a_forward_replaced_on_the_layer_is_refused_before_tuning_could_be_lost() -> None:
    layer = encoder_layer(model())
    layer.forward = nn.Identity().forward  # type: ignore[method-assign, assignment]
    with pytest.raises(ConfigurationError, match="forward of this TransformerEncoderLayer was replaced"):
        apply(layer, configuration(model()))


@kinds
def test_a_forward_replaced_on_a_submodule_is_called(kind: str) -> None:
    layer, twin = pair(kind)
    for module in (layer, twin):
        part: Any = next(part for part in module.modules() if isinstance(part, nn.LayerNorm))
        part.forward = lambda x, own=part.forward: 2 * own(x)
    with falls_back():
        assert_equal(gradients(layer, batch()), gradients(twin, batch()))
    assert layer.fallbacks == {"forward": 1}


def test_hooks_on_all_modules_are_called() -> None:
    layer, twin = pair("encoder")
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda part, *_: seen.append(type(part).__name__))
    try:
        with falls_back():
            torch.testing.assert_close(layer(batch()), twin(batch()))
    finally:
        handle.remove()
    assert seen.count("LayerNorm") == 4


def halved(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer).bfloat16()


def halved_pickle(layer: nn.Module) -> nn.Module:
    made: nn.Module = pickle.loads(pickle.dumps(layer))
    return made.bfloat16()


def normalised(layer: nn.Module) -> nn.Module:
    made = copy.deepcopy(layer)
    nn.utils.parametrizations.weight_norm(next(p for p in made.modules() if type(p) is nn.Linear))
    return made


def pruned(layer: nn.Module) -> nn.Module:
    made = copy.deepcopy(layer)
    prune.l1_unstructured(next(p for p in made.modules() if type(p) is nn.Linear), "weight", 0.5)  # type: ignore[no-untyped-call]
    return made


@kinds
@pytest.mark.parametrize("change", [halved, halved_pickle, normalised, pruned])
def test_a_copy_that_was_changed_runs_the_original(kind: str, change: Callable[[nn.Module], nn.Module]) -> None:
    layer, twin = (change(module) for module in pair(kind))
    x = batch(dtype=next(twin.parameters()).dtype)
    with falls_back():
        found = layer(x)
    torch.testing.assert_close(found, twin(x), rtol=1e-10, atol=1e-10)
    assert isinstance(layer, TunedModule)
    assert layer.calls == 0


@kinds
@pytest.mark.parametrize("change", [normalised, pruned])
def test_a_layer_whose_weights_were_taken_away_runs_the_original(
    kind: str, change: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, twin = pair(kind)
    layer(batch())
    monkeypatch.setattr(copy, "deepcopy", lambda module: module)
    for module in (layer, twin):
        change(module)
    gc.collect()
    with falls_back():
        torch.testing.assert_close(layer(batch()), twin(batch()), rtol=1e-10, atol=1e-10)
    assert layer.calls == 1


def test_a_copy_that_was_quantised_runs_the_original() -> None:
    layer, twin = (module.float() for module in pair("bert"))
    quantize: Any = torch.ao.quantization.quantize_dynamic
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = (
            quantize(module, {nn.Linear}, torch.qint8)(batch(dtype=torch.float32)) for module in (layer, twin)
        )
    torch.testing.assert_close(found, wanted)


@kinds
@pytest.mark.parametrize("strict", [True, False])
def test_it_is_exported_as_its_original(kind: str, strict: bool) -> None:
    layer, twin = pair(kind)
    with torch.no_grad():
        program = torch.export.export(layer.eval(), (batch(),), strict=strict)
    torch.testing.assert_close(program.module()(batch()), twin.eval()(batch()), rtol=1e-10, atol=1e-10)


@kinds
def test_it_is_traced_by_jit_as_its_original(kind: str) -> None:
    layer, twin = (module.eval() for module in pair(kind))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        traced: Any = torch.jit.trace(layer, (batch(),), check_trace=False)  # type: ignore[no-untyped-call]
        torch.testing.assert_close(traced(batch(1)), twin(batch(1)), rtol=1e-10, atol=1e-10)


def test_it_is_scripted_by_jit_as_its_original() -> None:
    layer, twin = (module.eval() for module in pair("encoder"))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(torch.jit.script(layer)(batch()), twin(batch()), rtol=1e-10, atol=1e-10)


@kinds
def test_restore_gives_the_frameworks_module_with_the_same_parameters_and_hooks(kind: str) -> None:
    layer, twin = pair(kind)
    seen: list[int] = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    found = restore(layer)
    assert type(found) is type(twin)
    assert all(one is other for one, other in zip(found.parameters(), layer.parameters(), strict=True))
    assert found.__dict__.keys() == twin.__dict__.keys()
    assert_equal(gradients(found, batch()), gradients(twin, batch()))
    assert (len(seen), layer.calls) == (1, 0)


def test_restore_replaces_every_tuned_layer_of_a_model_and_keeps_shared_ones_shared() -> None:
    layer, twin = pair("encoder")
    net = nn.Sequential(layer, nn.Sequential(layer, nn.Identity()))
    assert autotuner.restore(net) is net
    assert type(net[0]) is nn.TransformerEncoderLayer
    assert net[0] is net[1][0]  # type: ignore[index]
    torch.testing.assert_close(net(batch()), twin(twin(batch())))


def test_a_summary_says_which_share_ran_tuned_why_not_and_what_to_do() -> None:
    layer, _ = pair("encoder")
    net = nn.Sequential(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TunedWarning)
        for length in (6, 5, 5, 4):
            net(torch.randn(2, length, 8, dtype=torch.float64))
    found = autotuner.summary(net)
    assert (found.calls, found.tuned_share) == (1, 0.25)
    lines = str(found).splitlines()
    assert lines[0] == "25% of 4 calls of tuned layers ran a configuration"
    assert lines[1] == (
        "2 ran the original TransformerEncoderLayer with an input of shape (2, 5, 8) (reason: shape); to run it tuned, "
        "tune for this shape as well, and give apply a list: apply(layer, [one, other])"
    )
    assert "(2, 4, 8)" in lines[2]
    assert autotuner.summary().calls >= 1


def test_a_summary_of_a_model_without_tuned_layers_says_so() -> None:
    assert str(autotuner.summary(nn.Linear(2, 2))).startswith(
        "nothing ran tuned: no tuned layer was called, and no graph was compiled. Call what autotuner.apply(layer, ...)"
    )


def test_an_interleaved_plan_is_one() -> None:
    stored = {form for read in interleaved().steps for name, form in read.inputs if name == "key_weight"}
    assert "h*np@1/3#query_weight+key_weight+value_weight" in stored


@kinds
def test_a_whole_module_is_saved_and_loaded(kind: str) -> None:
    layer, twin = pair(kind)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=False)
    assert_equal(gradients(loaded, batch()), gradients(twin, batch()))  # type: ignore[arg-type]
