"""Drop-ins for modules of any class: outputs and gradients as eager's, and what `apply` promises of a drop-in."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.t5.modeling_t5 import T5Block
from transformers.models.vit.modeling_vit import ViTLayer

import autotuner
from autotuner.api.survey import found_in, region_calls
from autotuner.errors import ConfigurationError, TunedWarning
from autotuner.plan.configuration import Configuration
from autotuner.runtime.applied import AppliedModule
from autotuner.runtime.framework import encoder_layer
from tests.runtime.capture.known import assert_equal, planned
from tests.runtime.plans import configuration, model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:configurations were tuned on another device")]
BATCH, LENGTH, WIDTH, HEADS = 2, 12, 32, 4
COMMON = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": HEADS, "num_hidden_layers": 1}


class OwnBlock(nn.Module):
    """A GPT block as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = [
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.attention(self.norms[0](x)).chunk(3, -1)
        ]
        query, key, value = heads
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        made: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return made


class Gated(nn.Module):
    """A normalised, gated feed-forward with a residual."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.RMSNorm(WIDTH), dropout
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        both = functional.silu(self.gate(y)) * self.up(y)
        made: Tensor = x + self.down(functional.dropout(both, self.dropout) if self.dropout else both)
        return made


def rotated(kind: Any, config: Any) -> tuple[nn.Module, dict[str, Any]]:
    config._attn_implementation = "sdpa"
    positions = torch.arange(LENGTH)[None]
    embedding = LlamaRotaryEmbedding(transformers.LlamaConfig(**COMMON, head_dim=WIDTH // HEADS))
    cosines = embedding(torch.zeros(1, LENGTH, WIDTH), positions)
    return kind(config, 0), {"position_embeddings": cosines}


def llama() -> tuple[nn.Module, dict[str, Any]]:
    return rotated(LlamaDecoderLayer, transformers.LlamaConfig(**COMMON, num_key_value_heads=2))


def mistral() -> tuple[nn.Module, dict[str, Any]]:
    return rotated(
        MistralDecoderLayer, transformers.MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=None)
    )


def qwen3() -> tuple[nn.Module, dict[str, Any]]:
    return rotated(Qwen3DecoderLayer, transformers.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8))


def neox() -> tuple[nn.Module, dict[str, Any]]:
    module, arguments = rotated(GPTNeoXLayer, transformers.GPTNeoXConfig(**COMMON, rotary_pct=1.0, hidden_dropout=0.0))
    return module, arguments | {"attention_mask": None}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(n_embd=WIDTH, n_head=HEADS, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "sdpa"
    return GPT2Block(config, layer_idx=0), {}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.T5Config(d_model=WIDTH, d_kv=8, d_ff=64, num_heads=HEADS, dropout_rate=0.0)
    config._attn_implementation = "eager"
    return T5Block(config, has_relative_attention_bias=True), {}


def vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(**COMMON, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config._attn_implementation = "sdpa"
    return ViTLayer(config), {}


MODULES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "own GPT block": lambda: (OwnBlock(), {}),
    "gated feed-forwards": lambda: (nn.Sequential(Gated(), Gated(), Gated()), {}),
    "LLaMA layer": llama,
    "Mistral layer": mistral,
    "Qwen3 layer": qwen3,
    "GPT-NeoX layer": neox,
    "GPT-2 block": gpt2,
    "T5 block": t5,
    "ViT layer": vit,
    "two blocks": lambda: (nn.Sequential(OwnBlock(), OwnBlock()), {}),
    "norm first encoder layer": lambda: (
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, dropout=0.0, batch_first=True, norm_first=True), {},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def inputs(batch: int = BATCH, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, LENGTH, WIDTH, dtype=dtype)


def configurations(module: nn.Module, x: Tensor, **arguments: Any) -> list[Configuration]:
    """Return plans for the regions of a call, without measuring."""
    calls = region_calls(lambda x: module(x, **arguments), [(x,)])
    return [planned(each) for each in found_in(calls, module)]


def tensor_of(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def ran(module: nn.Module, x: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """Return a call's output, and the gradients of its input and all parameters."""
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    made = tensor_of(module(leaf, **arguments))
    (made.float() * torch.linspace(-1, 1, made.numel()).view(made.shape)).sum().backward()  # type: ignore[no-untyped-call]
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert leaf.grad is not None
    return found | {"of the input": leaf.grad, "made": made.detach()}


@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_gradients_are_those_of_eager(name: str) -> None:
    module, arguments = MODULES[name]()
    x = inputs()
    wanted = ran(module, x, **arguments)
    tuned = autotuner.apply(module, configurations(module, x, **arguments))
    assert isinstance(tuned, AppliedModule)
    assert isinstance(tuned, type(module))
    assert_equal(ran(tuned, x, **arguments), wanted, 2e-6)
    assert (tuned.calls, tuned.fallbacks.total()) == (1, 0)
    for one, other in zip(tuned.parameters(), module.parameters(), strict=True):
        assert one is other


@pytest.mark.parametrize("name", MODULES)
def test_under_autocast_it_runs_what_was_tuned_under_autocast(name: str) -> None:
    module, arguments = MODULES[name]()
    x = inputs()
    exact = ran(module, x, **arguments)

    def low(of: nn.Module) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return ran(of, x, **arguments)

    with torch.autocast("cpu", torch.bfloat16):
        found = configurations(module, x, **arguments)
    eager, tuned = low(module), autotuner.apply(module, found)
    made = low(tuned)
    assert isinstance(tuned, AppliedModule)
    assert tuned.calls == 1

    def distance(of: dict[str, Tensor]) -> float:
        return max(float((of[key].float() - exact[key]).norm() / exact[key].norm().clamp_min(1e-3)) for key in exact)

    assert distance(made) <= 1.5 * distance(eager)
    with pytest.warns(TunedWarning, match="the original .* runs, not the configuration"):
        assert_equal(ran(tuned, x, **arguments), exact, 1e-6)
    assert tuned.fallbacks["region"] == 1


def test_other_shapes_run_the_original_and_say_so_once() -> None:
    module = OwnBlock()
    tuned = autotuner.apply(module, configurations(module, inputs()))
    assert isinstance(tuned, AppliedModule)
    other = inputs(3)
    with pytest.warns(
        TunedWarning,
        match="original OwnBlock runs, not the configuration: the configuration that was given is not for this",
    ):
        made = tuned(other)
    torch.testing.assert_close(made, module(other), rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "configurations were tuned on another device")
        tuned(other)
        tuned(inputs())
    assert (tuned.calls, tuned.fallbacks) == (1, {"region": 2})
    summary = autotuner.summary(tuned)
    assert summary.fallbacks == {("OwnBlock", "region", (3, LENGTH, WIDTH)): 2}
    assert "33% of 3 calls of tuned layers ran a configuration" in str(summary)


def test_a_hook_that_is_added_to_a_submodule_behind_a_call_is_called() -> None:
    module, x = OwnBlock(), inputs()
    tuned = autotuner.apply(module, configurations(module, x))
    assert isinstance(tuned, AppliedModule)
    before = tuned(x)
    part = tuned.get_submodule("up")
    handle = part.register_forward_hook(lambda _, __, made: made * 2)
    with pytest.warns(TunedWarning, match="a submodule has hooks, which only the original calls"):
        found = tuned(x)
    torch.testing.assert_close(found, module(x), rtol=0, atol=0)  # it shares its submodules
    assert not torch.allclose(found, before)
    handle.remove()
    torch.testing.assert_close(tuned(x), before)
    assert (tuned.calls, tuned.fallbacks) == (2, {"hooks": 1})


def test_several_configurations_each_run_their_calls() -> None:
    module = OwnBlock()
    found = [each for batch in (2, 3) for each in configurations(module, inputs(batch))]
    tuned = autotuner.apply(module, found)
    assert isinstance(tuned, AppliedModule)
    for batch in (2, 3, 2):
        tuned(inputs(batch))
    assert (tuned.calls, tuned.fallbacks.total()) == (3, 0)


class OwnLayer(nn.TransformerEncoderLayer):
    """A layer of a class that nobody knows, and of which nobody can tell that it computes what its base does."""


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_a_configuration_of_a_model_file_runs_in_what_computes_the_same(seed: int, p: float) -> None:
    """Names, orders of operators and layouts of parameters differ between a model file and what is captured."""
    known = model(p=p)
    layer = encoder_layer(known, seed)
    own = OwnLayer(8, 2, 12, p, "gelu", batch_first=True, dtype=torch.float64)
    own.load_state_dict(layer.state_dict())
    tuned = autotuner.apply(own, configuration(known, seed))
    assert isinstance(tuned, AppliedModule)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    found = ran(tuned, x)
    assert (tuned.calls, tuned.fallbacks.total()) == (1, 0)
    if not p:
        assert_equal(found, ran(layer, x), 1e-12)
    with pytest.warns(TunedWarning, match="the configuration that was given is not for this computation"):
        tuned(x[:1])


def test_layers_of_a_model_share_what_is_compiled() -> None:
    layers = nn.Sequential(*(OwnBlock() for _ in range(12)))
    x = inputs()
    wanted = ran(layers, x)
    found = configurations(layers[0], x)
    before = len(autotuner.api.backend.COMPILED)
    for number, layer in enumerate(layers):
        layers[number] = autotuner.apply(layer, found)
    assert_equal(ran(layers, x), wanted, 2e-6)
    assert [layer.calls for layer in layers] == [1] * 12
    assert (
        len(autotuner.api.backend.COMPILED) - before <= 2
    )  # that of the first layer, whose input is a leaf, and others


def test_restored_copied_and_saved_it_is_what_it_was() -> None:
    module = OwnBlock()
    x = inputs()
    tuned = autotuner.apply(module, configurations(module, x))
    restored = autotuner.restore(tuned)
    assert type(restored) is OwnBlock
    assert restored.state_dict().keys() == module.state_dict().keys()
    assert not {"compiler", "configurations", "calls"} & set(restored.__dict__)
    twin = copy.deepcopy(tuned)
    assert isinstance(twin, AppliedModule)
    assert all(one is not other for one, other in zip(twin.parameters(), module.parameters(), strict=True))
    assert_equal(ran(twin, x), ran(module, x), 2e-6)
    file = io.BytesIO()
    torch.save(tuned, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_equal(ran(loaded, x), ran(module, x), 2e-6)
    assert loaded.calls == 1
    again = autotuner.apply(tuned, configurations(module, x))
    assert type(autotuner.restore(again)) is OwnBlock


def test_evaluation_without_gradients_and_mutation_of_weights_are_seen() -> None:
    module = OwnBlock()
    x = inputs()
    tuned = autotuner.apply(module, configurations(module, x))
    with torch.no_grad():
        torch.testing.assert_close(tuned(x), module(x), rtol=1e-5, atol=1e-5)
        module.up.weight.mul_(3)
        torch.testing.assert_close(tuned(x), module(x), rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.SGD(tuned.parameters(), lr=0.1)
    before = tuned(x).detach()
    tuned(x).square().mean().backward()
    optimizer.step()
    assert not torch.allclose(tuned(x), before)
    torch.testing.assert_close(tuned(x), module(x), rtol=1e-5, atol=1e-5)


def test_inside_a_compiled_model_the_graph_breaks_and_it_runs_tuned() -> None:
    module = OwnBlock()
    x = inputs()
    tuned = autotuner.apply(module, configurations(module, x))
    assert isinstance(tuned, AppliedModule)
    parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), tuned, nn.Linear(WIDTH, WIDTH))
    outer: Any = torch.compile(parts, backend="eager")
    wanted = parts[2](module(parts[0](x)))
    torch.testing.assert_close(outer(x), wanted, rtol=1e-5, atol=1e-5)
    assert (tuned.calls, tuned.fallbacks.total()) == (1, 0)


def test_it_is_traced_by_jit_as_its_original() -> None:
    module, x = OwnBlock(), inputs()
    tuned = autotuner.apply(module, configurations(module, x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced: Any = torch.jit.trace(tuned, (x,))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced(2 * x), module(2 * x))


def second_derivatives(module: nn.Module, x: Tensor, **arguments: Any) -> dict[str, Tensor]:
    """Return gradients of a penalty on the gradient of x, by the parameter's name."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    (grad,) = torch.autograd.grad(tensor_of(module(x, **arguments)).square().sum(), x, create_graph=True)
    grad.square().sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("name", ["own GPT block", "gated feed-forwards", "LLaMA layer"])
def test_second_derivatives_are_those_of_eager(name: str) -> None:
    module, arguments = MODULES[name]()
    x = inputs()
    tuned = autotuner.apply(module, configurations(module, x, **arguments))
    found = second_derivatives(tuned, x, **arguments)
    with sdpa_kernel(SDPBackend.MATH):  # torch's other attention has no second derivative
        wanted = second_derivatives(module, x, **arguments)
    assert tuned.calls == 1
    assert found.keys() == wanted.keys()
    for of, value in wanted.items():
        torch.testing.assert_close(found[of], value, rtol=2e-4, atol=2e-5 * float(value.abs().max()), msg=of)


def test_a_second_derivative_through_dropout_is_refused_in_a_sentence() -> None:
    module, x = nn.Sequential(Gated(0.5), Gated(0.5)), inputs().requires_grad_()
    tuned = autotuner.apply(module, configurations(module, x.detach()))
    (grad,) = torch.autograd.grad(tuned(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="a second derivative through a tuned region"):
        grad.sum().backward()  # type: ignore[no-untyped-call]


def test_what_does_not_fit_is_refused() -> None:
    module = OwnBlock()
    found = configurations(module, inputs())
    with pytest.raises(ConfigurationError, match="is of another module: its parameters have shapes such as"):
        autotuner.apply(nn.Linear(5, 7), found)
    with pytest.raises(ConfigurationError, match="a compiled module, OptimizedModule: give the one that was"):
        autotuner.apply(torch.compile(module, backend="eager"), found)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is of another module: its parameters have shapes such as"):
        autotuner.apply(module, configuration(model()))
    module.forward = module.forward  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="the forward of this OwnBlock was replaced on the instance"):
        autotuner.apply(module, found)
