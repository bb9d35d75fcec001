"""What layer to layer cannot compute is refused, and what happens around steps leaves them as they should be."""

import copy
import gc
import pickle
import weakref
from collections import UserDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autotuner
from autotuner.errors import InputError
from autotuner.runtime.layer_to_layer.call import RepeatedCall
from autotuner.runtime.layer_to_layer.stash import HostStash
from tests.runtime.test_layer_to_layer import Block, Net, adamw, assert_equal, batch, loss_of, of, plain_step


def layered(model: nn.Module, loss: Any = loss_of, **options: Any) -> Any:
    return autotuner.layer_to_layer(model, adamw(model), loss, compiler=None, **options)


@dataclass
class Held:
    """An object with a tensor."""

    x: Tensor


class Leaking(Block):
    """A layer that keeps what it makes."""

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        self.kept = super().forward(x, side)
        return self.kept


class Appending(Block):
    """A layer that appends to a list."""

    def forward(self, x: Any, side: Any = None) -> Any:
        side.append(x.square().mean())
        return super().forward(x)


class InPlace(Block):
    """A layer that writes to its input."""

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        return super().forward(x.add_(1.0), side)


class Wrapping(Block):
    """A layer that returns an object of a class."""

    def forward(self, x: Any, side: Any = None) -> Any:  # noqa: ARG002
        return Held(super().forward(x.x if isinstance(x, Held) else x))


class Counting(Block):
    """A layer that counts its calls behind autograd's back."""

    count: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        self.count.data += 1
        return super().forward(x, side)


class Replacing(Counting):
    """A layer that counts its calls in a new buffer each time."""

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        self.count = self.count + 1
        return Block.forward(self, x, side)


def hooked(parameter: Tensor) -> None:
    parameter.register_hook(torch.neg)  # type: ignore[no-untyped-call]


def with_layers(kind: type[Block], forward: Callable[[Net, Tensor], Tensor] | None = None) -> Net:
    model = Net()
    model.blocks = nn.ModuleList(kind(8) for _ in range(2))
    if forward is not None:
        model.forward = lambda tokens: forward(model, tokens)  # type: ignore[method-assign]
    return model


def through(model: Net, tokens: Tensor, *side: Any) -> Any:
    x: Any = model.embedding(tokens)
    for block in model.blocks:
        x = block(x, *side)
    return x


def head_of_kept(model: Net, tokens: Tensor) -> Tensor:
    found: Tensor = model.head(through(model, tokens) + of(model, 1).kept)
    return found


def appended(model: Net, tokens: Tensor) -> Tensor:
    aside: list[Tensor] = []
    found: Tensor = model.head(through(model, tokens, aside)) + sum(aside)
    return found


def unwrapped(model: Net, tokens: Tensor) -> Tensor:
    found: Tensor = model.head(through(model, tokens).x)
    return found


@pytest.mark.parametrize("model, words", [
    pytest.param(
        lambda: with_layers(Leaking, head_of_kept), r"blocks\.1 has made reaches the loss otherwise", id="leak"
    ),
    pytest.param(
        lambda: with_layers(Appending, appended), r"^blocks\.0 changes a list or mapping that it is given", id="list"
    ),
    pytest.param(lambda: with_layers(InPlace), r"^blocks\.0 changes its input in place", id="in place"),
    pytest.param(
        lambda: with_layers(Wrapping, unwrapped), r"^blocks\.0 returns a Held that holds tensors", id="object"
    ),
    pytest.param(lambda: with_layers(Counting), r"^blocks\.0 writes to its buffers", id="buffer"),
    pytest.param(lambda: with_layers(Replacing), r"^blocks\.0 writes to its buffers", id="new buffer"),
])  # fmt: skip
def test_layers_whose_gradients_would_be_lost_are_refused(model: Callable[[], Net], words: str) -> None:
    made = model()
    before = copy.deepcopy(list(made.parameters()))
    with pytest.raises(InputError, match=words):
        layered(made, optimizer_in_backward=True)(batch(0))
    assert all(torch.equal(one, other) for one, other in zip(before, made.parameters(), strict=True))


def test_inputs_that_have_no_gradient_are_not_changed_in_place_either() -> None:
    model = with_layers(InPlace)
    model.embedding.requires_grad_(False)
    with pytest.raises(InputError, match=r"^blocks\.0 changes its input in place"):
        layered(model)(batch(0))


def penalised(model: Any, given: Any) -> Tensor:
    return loss_of(model, given) + 1e-2 * of(model, 1).grow.weight.square().sum()


def test_a_penalty_on_weights_of_layers_is_refused() -> None:
    with pytest.raises(InputError, match=r"^parameters of blocks\.1 are read outside of its forward, by the loss"):
        layered(Net(), penalised)(batch(0))


def test_micro_batches_that_would_read_each_others_tensors_are_refused() -> None:
    model = Net()

    def masked(tokens: Tensor) -> Tensor:
        model.mask = (tokens % 2).unsqueeze(-1).float()
        found: Tensor = model.head(through(model, tokens)) * model.mask
        return found

    model.forward = masked  # type: ignore[method-assign]
    step = layered(model)
    step(batch(0))
    with pytest.raises(InputError, match=r"keeps a tensor of one micro-batch in its attribute mask, .* one"):
        step(batch(0), batch(1))


def test_what_layers_keep_for_themselves_is_no_matter() -> None:
    model = with_layers(Leaking)
    twin = copy.deepcopy(model)
    optimizer, step = adamw(twin), layered(model)
    assert torch.equal(step(batch(0), batch(1)), plain_step(twin, optimizer, batch(0), batch(1)))


@pytest.mark.parametrize("change, words", [
    (lambda m: m.blocks.bfloat16(), r"^blocks\.0 has changed since .* another type"),
    (lambda m: of(m, 1).grow.requires_grad_(False), r"^blocks\.1 has changed since .* require a gradient"),
    (lambda m: m.load_state_dict(m.state_dict(), assign=True), r"^blocks\.0 has changed since .* was replaced"),
    (lambda m: hooked(of(m, 2).grow.weight), r"^a parameter of blocks\.2 has a hook"),
])  # fmt: skip
def test_models_that_change_behind_a_step_are_refused(change: Callable[[nn.Module], Any], words: str) -> None:
    model = Net()
    step = layered(model)
    step(batch(0))
    change(model)
    with pytest.raises(InputError, match=words):
        step(batch(1))


def test_a_copy_of_the_model_is_a_plain_model() -> None:
    model = Net()
    step = layered(model)
    step(batch(0))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            of(copied, 1).grow.weight.mul_(3.0)
        plain = Net()
        plain.load_state_dict(copied.state_dict())
        assert torch.equal(copied(batch(1)["tokens"]), plain(batch(1)["tokens"]))
        torch.autograd.backward(loss_of(copied, batch(1)))
        assert of(copied, 0).grow.weight.grad is not None


def test_checkpoints_of_two_types_are_saved(tmp_path: Path) -> None:
    model = Net()
    for block in model.blocks:
        assert isinstance(block, Block)
        block.norm.double()
    layered(model)
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt")
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_parameters_that_come_later_and_are_in_no_layer_are_trained() -> None:
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    steps = []
    for each in (model, twin):
        each.head.requires_grad_(False)
        steps.append(torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.02, fused=True))
    step = autotuner.layer_to_layer(twin, steps[1], loss_of, compiler=None)
    for each, optimizer in zip((model, twin), steps, strict=True):
        each.head.requires_grad_(True)
        optimizer.add_param_group({"params": list(each.head.parameters())})
    for number in range(2):
        assert torch.equal(step(batch(number)), plain_step(model, steps[0], batch(number)))
    assert_equal(model, twin)


class Failing(Block):
    """A layer whose backward fails once."""

    fails = False

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        found = super().forward(x, side)
        if Failing.fails:
            found.register_hook(self.fail)  # type: ignore[no-untyped-call]
        return found

    def fail(self, _: Tensor) -> None:
        Failing.fails = False
        raise MemoryError("no memory")


def test_an_error_in_backward_leaves_no_gradient_behind() -> None:
    torch.manual_seed(0)
    model = with_layers(Failing)
    twin = copy.deepcopy(model)
    optimizer, step = adamw(twin), layered(model, stash="host")
    plain_step(twin, optimizer, batch(0))
    step(batch(0))
    Failing.fails = True
    with pytest.raises(MemoryError):
        step(batch(1), batch(2))
    Failing.fails = False
    assert torch.equal(step(batch(1)), plain_step(twin, optimizer, batch(1)))
    assert torch.equal(step(batch(2)), plain_step(twin, optimizer, batch(2)))


def test_an_error_of_the_optimizer_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = adamw(model)
    step = autotuner.layer_to_layer(model, optimizer, loss_of, compiler=None, optimizer_in_backward=True)
    step(batch(0))
    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(batch(1))
    step(batch(2))


def test_memory_of_optimizers_before_has_the_order_of_the_parameters_now() -> None:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        grow = block.grow
        assert isinstance(grow, nn.Linear)
        grow.weight.data = grow.weight.data.t().contiguous().t()  # as channels-last models have it
    twin = copy.deepcopy(model)
    mine, other = adamw(model), adamw(twin)
    for each, optimizer in ((model, mine), (twin, other)):
        plain_step(each, optimizer, batch(0))
    step = autotuner.layer_to_layer(twin, other, loss_of, compiler=None)
    for number in range(1, 3):
        torch.testing.assert_close(step(batch(number)), plain_step(model, mine, batch(number)), rtol=1e-6, atol=1e-6)


class Pairs(nn.Module):
    """Layers as lists of two modules, which cannot be called themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.ModuleList([Block(8), Block(8)]) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        pairs: Any = self.layers
        for first, second in pairs:
            x = second(first(x))
        found: Tensor = self.head(x)
        return found


def test_members_of_lists_in_lists_are_layers() -> None:
    torch.manual_seed(0)
    model = Pairs()
    twin = copy.deepcopy(model)
    optimizer, step = adamw(model), layered(twin)
    assert step.layers[:3] == ("layers.0.0", "layers.0.1", "layers.1.0")
    for number in range(2):
        assert torch.equal(step(batch(number)), plain_step(model, optimizer, batch(number)))
    assert_equal(model, twin)


def test_batches_of_any_mapping_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Any] = []
    own = Tensor.to

    def noted(tensor: Tensor, *given: Any, **named: Any) -> Tensor:
        moved.append(given)
        return own(tensor, *given, **named)

    monkeypatch.setattr(Tensor, "to", noted)
    layered(Net())(UserDict(batch(0)))
    assert len([given for given in moved if given[:1] == (torch.device("cpu"),)]) >= 2


def test_steps_that_are_made_twice_or_closed_say_so() -> None:
    model = Net()
    step = layered(model)
    with pytest.raises(InputError, match=r"^this model has a step already: step\.close\(\) first"):
        layered(model)
    step.close()
    with pytest.raises(InputError, match=r"^this step is closed: make a new one"):
        step(batch(0))
    layered(model)(batch(0))


@pytest.mark.parametrize("given, words", [
    ({"max_norm": 0.0}, r"^max_norm=0\.0: give a number above 0"),
    ({"max_norm": "1"}, r"^max_norm='1': give a number above 0"),
    ({"device": "gpu"}, r"^device='gpu': "),
    ({"link_dtype": torch.float16}, r"^link_dtype=torch\.float16: give torch\.bfloat16"),
])  # fmt: skip
def test_options_of_other_kinds_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        layered(Net(), **given)


def test_what_is_no_model_or_has_another_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="takes a module and an optimizer of torch's, and was given str and AdamW"):
        autotuner.layer_to_layer("llama", adamw(Net()))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^the optimizer has none of the model's parameters"):
        autotuner.layer_to_layer(Net(), adamw(Net()))


def test_weights_are_rounded_on_the_way_under_autocast_alone() -> None:
    step = layered(Net(), link_dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"^link_dtype=torch\.bfloat16 is for steps and evaluation under torch"):
        step(batch(0))


def test_a_loss_without_a_gradient_is_told() -> None:
    with pytest.raises(InputError, match=r"^the loss has no gradient: it is detached, or no parameter is trained"):
        layered(Net(), lambda model, given: loss_of(model, given).detach())(batch(0))


def test_calls_go_as_backward_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[RepeatedCall]] = []
    most: list[int] = []
    put, take = HostStash.put, HostStash.take

    def noting(stash: HostStash, call: RepeatedCall) -> None:
        alive.append(weakref.ref(call))
        put(stash, call)

    def counting(stash: HostStash, call: RepeatedCall) -> None:
        gc.collect()
        take(stash, call)
        calls = [each for each in (found() for found in alive) if each is not None]
        most.append(sum(isinstance(leaf, Tensor) for each in calls for leaf in each.inputs.leaves))

    monkeypatch.setattr(HostStash, "put", noting)
    monkeypatch.setattr(HostStash, "take", counting)
    layered(Net(depth=12), stash="host")(batch(0))
    # The first layer's input stays on the device; of the others, only that of the layer that runs is there. The last
    # one's call is not put aside, and not counted.
    assert most == [1] + [2] * 10 + [1]


def test_host_memory_for_inputs_is_used_again_for_other_shapes() -> None:
    model = Net()
    step = layered(model, stash="host")
    stash = step._stash
    held = []
    for rows in (8, 3, 5, 8, 1, 7):
        step({name: tensor[:1].expand(rows, -1) for name, tensor in batch(0).items()})
        held.append(sum(buffer.numel() for buffer in stash._all))
    assert len(set(held)) == 1


class Biasing(Block):
    """A layer that returns a bias beside its output, which all layers behind it read."""

    def forward(self, x: Any, side: Any = None) -> Any:
        bias = self.norm(x) if side is None else side
        return super().forward(x, bias), bias


def biased(model: Net, tokens: Tensor) -> Tensor:
    x, bias = model.embedding(tokens), None
    for block in model.blocks:
        x, bias = block(x, bias)
    found: Tensor = model.head(x)
    return found


def test_what_a_layer_makes_for_all_others_is_on_the_host_once() -> None:
    torch.manual_seed(0)
    model = with_layers(Biasing, biased)
    model.blocks.extend(Biasing(8) for _ in range(4))
    twin = with_layers(Biasing, biased)
    twin.blocks.extend(Biasing(8) for _ in range(4))
    twin.load_state_dict(model.state_dict())
    optimizer, step = adamw(twin), layered(model, stash="host")
    for number in range(2):
        torch.testing.assert_close(step(batch(number)), plain_step(twin, optimizer, batch(number)))
    # Of 3 * 5 tokens of 8 numbers, in multiples of 256 bytes: the outputs of four layers, and one bias.
    assert step.stash_bytes == 5 * 512


class Asking(Block):
    """A layer that asks whether two of its inputs are one tensor, as attention does."""

    def forward(self, x: Any, side: Any = None) -> Any:
        assert side is x
        return super().forward(x, side)


def doubled(model: Net, tokens: Tensor) -> Tensor:
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x, side=x)
    found: Tensor = model.head(x)
    return found


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_tensor_that_is_given_twice_is_one_tensor(stash: str) -> None:
    torch.manual_seed(0)
    model, twin = with_layers(Asking, doubled), with_layers(Asking, doubled)
    twin.load_state_dict(model.state_dict())
    optimizer, step = adamw(twin), layered(model, stash=stash)
    for number in range(2):
        assert torch.equal(step(batch(number)), plain_step(twin, optimizer, batch(number)))
    assert_equal(model, twin)


FACTOR: ContextVar[float] = ContextVar("factor", default=1.0)


class Scaling(Block):
    """A layer that reads a variable of its caller's context."""

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        return super().forward(x, side) * FACTOR.get()


def scaled(model: Net, tokens: Tensor) -> Tensor:
    token = FACTOR.set(3.0)
    try:
        found: Tensor = model.head(through(model, tokens))
    finally:
        FACTOR.reset(token)
    return found


def added_in_place(model: Net, tokens: Tensor) -> Tensor:
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x)
        x += 1.0
    found: Tensor = model.head(x)
    return found


class Views(Block):
    """A layer that returns a view of a parameter."""

    def forward(self, x: Tensor, side: Tensor | None = None) -> Any:
        return super().forward(x, side), self.norm.bias.view(1, 1, -1)


def with_views(model: Net, tokens: Tensor) -> Tensor:
    x = model.embedding(tokens)
    views = []
    for block in model.blocks:
        x, view = block(x)
        views.append(view)
    found: Tensor = model.head(x + sum(views))
    return found


@pytest.mark.parametrize("kind, forward", [(Scaling, scaled), (Block, added_in_place), (Views, with_views)])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_models_may_do_around_layers(kind: Any, forward: Any, parts: int) -> None:
    torch.manual_seed(0)
    model, twin = with_layers(kind, forward), with_layers(kind, forward)
    model.blocks.extend(kind(8) for _ in range(2))
    twin.blocks.extend(kind(8) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizer, step = adamw(twin), layered(model)
    for number in range(3):
        given = [batch(10 * number + part) for part in range(parts)]
        torch.testing.assert_close(step(*given), plain_step(twin, optimizer, *given), rtol=1e-6, atol=1e-6)


def residual_in_place(model: Net, tokens: Tensor) -> Tensor:
    x = model.embedding(tokens) * 1.0
    for block in model.blocks:
        y = block(x)
        x += y
    found: Tensor = model.head(x)
    return found


class Copying(Block):
    """A layer that copies its input first, so that autograd has no objection to a later change of it."""

    def forward(self, x: Tensor, side: Tensor | None = None) -> Tensor:
        return super().forward(x * 1.0, side)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_inputs_that_the_caller_changes_after_the_call_are_refused(stash: str) -> None:
    model = with_layers(Copying, residual_in_place)
    with pytest.raises(InputError, match=r"^what blocks\.0 was given was changed in place after the call"):
        layered(model, stash=stash)(batch(0))


def masked_by_buffer(model: Net, tokens: Tensor) -> Tensor:
    mask = model.get_buffer("mask")
    mask.copy_((tokens % 2).unsqueeze(-1))
    found: Tensor = model.head(through(model, tokens)) * mask
    return found


def test_buffers_that_micro_batches_would_take_from_each_other_are_refused() -> None:
    model = with_layers(Block, masked_by_buffer)
    model.register_buffer("mask", torch.zeros(3, 5, 1))
    with pytest.raises(InputError, match="keeps a tensor of one micro-batch in its attribute mask"):
        layered(model)(batch(0), batch(1))


def test_writes_by_data_count_at_the_next_step_and_the_next_evaluation() -> None:
    torch.manual_seed(0)
    model = Net(depth=2)
    twin = copy.deepcopy(model)
    optimizer, step = adamw(twin), layered(model)
    for number in range(2):
        assert torch.equal(step(batch(number)), plain_step(twin, optimizer, batch(number)))
        for each in (model, twin):
            of(each, 1).grow.weight.data.mul_(0.5)
        with torch.no_grad():
            assert torch.equal(model(batch(9)["tokens"]), twin(batch(9)["tokens"]))
        for each in (model, twin):
            of(each, 0).grow.weight.data.mul_(0.5)


class Stemmed(Net):
    """A net with a list of parts with batch normalisation in front of its layers."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(5)) for _ in range(2))
        self.stem = nn.Sequential(*parts)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stem(self.embedding(tokens))
        for block in self.blocks:
            x = block(x)
        found: Tensor = self.head(x)
        return found


def test_a_stem_with_batch_normalisation_stays_on_the_device() -> None:
    torch.manual_seed(0)
    model = Stemmed()
    twin = copy.deepcopy(model)
    optimizer, step = adamw(twin), layered(model)
    assert step.layers == tuple(f"blocks.{number}" for number in range(4))
    for number in range(2):
        given = [batch(number), batch(number + 5)]
        assert torch.equal(step(*given), plain_step(twin, optimizer, *given))
    for mine, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, other)


class EnteredOnce:
    """A patch of settings that cannot be entered twice, as those of torch 2.11."""

    def __init__(self) -> None:
        self.is_entered, self.times = False, 0

    def __enter__(self) -> None:
        assert not self.is_entered
        self.is_entered = True
        self.times += 1

    def __exit__(self, *_: object) -> None:
        self.is_entered = False


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_a_checkpoint_around_layers_is_refused(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: Any, given: Any) -> Any:
        return checkpoint(loss_of, model, given, use_reentrant=False)

    patch = EnteredOnce()
    monkeypatch.setattr(type(torch._functorch.config), "patch", lambda _, **__: patch)
    torch.manual_seed(0)
    model = Net()
    twin, step = copy.deepcopy(model), layered(model, loss)
    with pytest.raises(InputError, match=r"blocks\.\d runs twice in one forward"):
        step(*(batch(number) for number in range(parts)))
    assert patch.times == 1
    assert not patch.is_entered
    assert_equal(model, twin)
    step.loss = lambda given: loss_of(model, given)
    optimizer = adamw(twin)
    assert torch.equal(step(batch(0)), plain_step(twin, optimizer, batch(0)))
    assert_equal(model, twin)
