"""Gradients that are exchanged while a compiled model's backward goes on: values, order, and what is left alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, distributed, nn

import autotuner
from autotuner.api.survey import found_in, region_calls
from autotuner.runtime import gradient_exchange, handed_over
from autotuner.runtime.early_gradients import Made, in_place_of
from autotuner.runtime.gradient_bucket import Bucket
from tests.processes import spawn
from tests.runtime.capture.known import planned
from tests.runtime.made_up_device import instead_of_the_cpu

RANKS, STEPS, LAYERS, WIDTH, ROWS, LENGTH, WORDS = 2, 5, 3, 64, 4, 8, 40
BUCKET_BYTES = 64 << 10
HOOKED = "bert.encoder.layer.1.output.dense.weight"


class Model(nn.Module):
    """A small BERT, which a loss may read in further ways."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = transformers.BertForMaskedLM(
            transformers.BertConfig(
                vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
                intermediate_size=2 * WIDTH, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.inner(input_ids=ids).logits
        return found


def plain(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids).square().mean()
    return loss


def twice(model: Any, ids: Tensor) -> Tensor:
    return plain(model, ids) + 0.5 * plain(model, ids.flip(1))


def with_weights(model: Any, ids: Tensor) -> Tensor:
    own = getattr(model, "_orig_mod", model)
    also: Tensor = own.inner.bert.encoder.layer[1].output.dense.weight.square().sum()
    return plain(model, ids) + also


@torch.compiler.disable  # type: ignore[untyped-decorator]
def penalty(model: nn.Module) -> Tensor:
    found: Tensor = model.get_parameter(f"inner.{HOOKED}").square().sum()
    return found


def with_a_penalty(model: Any, ids: Tensor) -> Tensor:
    """Read a weight outside of the graph that is compiled."""
    also: Tensor = penalty(getattr(model, "_orig_mod", model))
    return plain(model, ids) + also


def doubled_at_last(model: nn.Module) -> None:
    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)

    model.get_parameter(f"inner.{HOOKED}").register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]


def doubled(model: nn.Module) -> None:
    model.get_parameter(f"inner.{HOOKED}").register_hook(lambda gradient: gradient.mul_(2))  # type: ignore[no-untyped-call]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_norm": 0.05},
    "shared out": {"shard_optimizer": True, "max_norm": 0.05},
    "micro-batches": {"micro": 3, "max_norm": 0.05},
    "micro-batches, shared out": {"micro": 2, "shard_optimizer": True, "max_norm": 0.05},
    "micro-batches, captured": {"micro": 2, "captured": True, "max_norm": 0.05},
    "micro-batches, weights in a loss that is not compiled": {"micro": 2, "loss": with_a_penalty},
    "called twice": {"loss": twice},
    "weights in the loss": {"loss": with_weights},
    "weights in a loss that is not compiled": {"loss": with_a_penalty},
    "a hook": {"prepare": doubled},
    "a hook at last": {"prepare": doubled_at_last},
    "inductor": {"compiler": "inductor"},
}


def batch(number: int, part: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(10 * number + part))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def noting(events: list[str], told: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: Any, **named: Any) -> Any:
        events.append(told)
        return own(*given, **named)

    return noted


def run_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    rows = slice(ROWS // RANKS * rank, ROWS // RANKS * (rank + 1))
    events: list[str] = []
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(gradient_exchange, "chosen_limit", lambda *_: BUCKET_BYTES)
    exchange = gradient_exchange.GradientExchange
    monkeypatch.setattr(handed_over.HandedOver, "take", noting(events, "made", handed_over.HandedOver.take))
    monkeypatch.setattr(exchange, "_launch", noting(events, "sent", exchange._launch))
    monkeypatch.setattr(exchange, "_collect", noting(events, "came", exchange._collect))
    monkeypatch.setattr(torch.autograd, "backward", noting(events, "backward", torch.autograd.backward))
    copy = torch._foreach_copy_

    def copied(targets: list[Tensor], sources: list[Tensor]) -> None:
        events.extend(["copied"] * len(targets))
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    models = found_in(region_calls(Model(), [(batch(0)[rows],)]), Model())
    found: dict[str, Any] = {}
    for name, given in CASES.items():
        torch._dynamo.reset()
        options = dict(given)
        loss, micro, prepare = options.pop("loss", plain), options.pop("micro", 1), options.pop("prepare", None)
        captures = pytest.MonkeyPatch()
        if options.pop("captured", False):
            instead_of_the_cpu(captures)
        model = Model()
        if prepare is not None:
            prepare(model)
        step = autotuner.training_step(
            model, adamw(model), loss, configurations=[planned(each) for each in models],
            **{"compiler": "aot_eager"} | options,
        )  # fmt: skip
        for number in range(STEPS):
            events.clear()
            step(*(batch(number, part)[rows] for part in range(micro)))
        captures.undo()
        found[name] = values(model), list(events), step.replays
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    spawn(run_rank, (str(folder),), RANKS)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def alone(case: dict[str, Any]) -> list[Tensor]:
    """Return what one process without any package has after the same steps, with the batches of both."""
    model, micro = Model(), case.get("micro", 1)
    case.get("prepare", lambda _: None)(model)
    optimizer = adamw(model)
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            torch.autograd.backward(case.get("loss", plain)(model, batch(number, part)) / micro)
        if "max_norm" in case:
            nn.utils.clip_grad_norm_(model.parameters(), case["max_norm"])
        optimizer.step()
    return values(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process_with_the_whole_batch(ranks: list[dict[str, Any]], name: str) -> None:
    assert all(map(torch.equal, ranks[0][name][0], ranks[1][name][0]))
    for mine, wanted in zip(ranks[0][name][0], alone(CASES[name]), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_buckets_are_sent_while_backward_goes_on(ranks: list[dict[str, Any]], name: str) -> None:
    _, events, replays = ranks[0][name]
    assert replays == (2 if CASES[name].get("captured") else 0)
    assert events.count("backward") == CASES[name].get("micro", 1)
    assert "sent" not in events[: last_of(events, "backward")]
    early = events[: events.index("came")].count("sent")
    assert events.count("sent") > LAYERS
    if "called twice" in name:  # parts of a gradient are not the whole one
        assert early == 0
    else:
        assert early >= LAYERS - 1
        assert "made" in events[events.index("sent") :]


@pytest.mark.slow
def test_regions_of_a_captured_step_write_gradients_to_their_buckets(ranks: list[dict[str, Any]]) -> None:
    def copies(name: str) -> int:
        events = ranks[0][name][1]
        return sum(event == "copied" for event in events[: events.index("came")])

    assert copies("plain") == copies("micro-batches") == 16 * LAYERS
    assert copies("micro-batches, captured") <= 3 * (LAYERS - 1)  # query, key and value, where a bucket ends


def last_of(events: list[str], told: str) -> int:
    return len(events) - 1 - events[::-1].index(told)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
def test_updates_in_backward_take_gradients_over_and_hand_out_memory_that_all_share(
    monkeypatch: pytest.MonkeyPatch, micro: int
) -> None:
    most: list[int] = []
    take = handed_over.HandedOver.take

    def noted(own: Any, made: Any) -> list[Tensor]:
        found = take(own, made)
        addresses.update(tensor.data_ptr() for tensor in found)
        return found

    monkeypatch.setattr(handed_over.HandedOver, "take", noted)
    models = found_in(region_calls(Model(), [(batch(0),)]), Model())
    found = []
    for in_backward in (False, True):
        torch._dynamo.reset()
        model = Model()
        step = autotuner.training_step(
            model, adamw(model), plain, configurations=[planned(each) for each in models], compiler="aot_eager",
            optimizer_in_backward=in_backward,
        )  # fmt: skip
        for number in range(STEPS):
            addresses: set[int] = set()
            step(*(batch(number, part) for part in range(micro)))
            most.append(len(addresses))
        found.append(values(model))
    assert all(map(torch.equal, *found))
    assert most[:STEPS] == [0] * STEPS
    assert most[STEPS] > 10 * LAYERS  # which gradients are whole is found out by the first step
    assert max(most[STEPS + 1 :]) <= 3  # as larger ones come


def test_what_earlier_micro_batches_have_left_is_in_a_gradient_that_is_taken_over() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    taken: list[list[float]] = []

    def take_over(ready: Any) -> list[Tensor | None]:
        taken.extend(gradient.tolist() for _, made in ready for gradient in made.gradients)
        return [None] * len(ready)

    handed = handed_over.HandedOver(take_over)

    def backward(earlier: float, *parts: float) -> tuple[bool, list[float]]:
        """Return whether the gradient is whole, and its value; torch has it in so many parts, the first handed over."""
        parameter.grad = torch.full((3,), earlier)
        with handed.of([parameter]):
            gradient = torch.full((3,), parts[0])
            (found,) = handed.take([Made([parameter], [gradient], gradient)])
            for part in parts[1:]:
                found = found + part
            parameter.grad = found if parameter.grad is None else parameter.grad.add_(found)
            is_whole = handed.has_come(parameter)
        return is_whole, parameter.grad.tolist()

    assert backward(1.0, 2.0) == (True, [3.0] * 3)
    assert taken == []  # it is offered once it is known
    assert backward(1.0, 2.0) == (True, [3.0] * 3)
    assert taken == [[3.0] * 3]
    assert backward(1.0, 2.0, 4.0) == (False, [7.0] * 3)
    assert backward(1.0, 2.0, 4.0) == (False, [7.0] * 3)
    assert taken == [[3.0] * 3] * 2


def test_what_earlier_micro_batches_have_left_stays_where_backward_does_not_come_to_a_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    handed = handed_over.HandedOver(lambda ready: [None] * len(ready))
    with handed.of([parameter]):
        handed.take([Made([parameter], [torch.ones(3)], torch.ones(3))])
        assert parameter.grad is None
    assert torch.equal(parameter.grad, torch.ones(3))


def test_a_gradient_is_whole_where_torch_has_what_was_handed_out_and_nothing_more() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    offered: list[int] = []

    def take_over(ready: Any) -> list[Tensor | None]:
        offered.append(len(ready))
        return [None] * len(ready)

    handed = handed_over.HandedOver(take_over)

    def backward(*parts: Tensor) -> list[bool]:
        """Return what is said of each part once it has come; the first one is handed over."""
        parameter.grad, told = None, []
        with handed.of([parameter]):
            (found,) = handed.take([Made([parameter], [parts[0]], parts[0])])
            for part in parts:
                parameter.grad = found if parameter.grad is None else parameter.grad.add_(part)
                told.append(handed.has_come(parameter))
        return told

    assert backward(torch.ones(3)) == [True]
    assert offered == []  # it is offered once it is known
    assert backward(torch.ones(3)) == [True]
    assert offered == [1]
    assert backward(torch.ones(3), torch.ones(3)) == [True, False]
    assert backward(torch.ones(3)) == [False]  # and never again
    assert offered == [1, 1]


def bucket() -> tuple[Bucket, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(4, 8)) for _ in range(3)]
    made = Bucket(parameters)
    made.begin()
    return made, parameters


def test_gradients_begin_where_kernels_of_the_device_may_write_and_gaps_are_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotuner.runtime.gradient_bucket.alignment_bytes", lambda _: 256)
    made, parameters = bucket()
    for parameter in parameters:
        parameter.grad = torch.ones(4, 8)
    flat = made.fill()
    begins = [made.view_of(parameter).storage_offset() for parameter in parameters]
    assert begins == [0, 64, 128]  # of float32
    assert (float(flat.sum()), made.size) == (3 * 32, 3 * 256)


def put(made: Bucket, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    return made.taken_over(parameter).copy_(gradient)


def test_what_is_handed_out_in_place_of_a_stack_is_memory_of_the_bucket_that_torch_takes_for_its_own() -> None:
    made, parameters = bucket()
    whole = torch.randn(2, 4, 8)
    views = [put(made, p, piece) for p, piece in zip(parameters[1:], whole.unbind(0), strict=True)]
    handed = in_place_of(whole, views)
    assert handed is not None
    assert torch.equal(handed, whole)
    assert handed.data_ptr() == views[0].data_ptr()
    assert handed.storage_offset() == 0
    views[1].zero_()
    assert not handed[1].any()


def test_parts_that_do_not_lie_behind_each_other_are_handed_out_as_they_are() -> None:
    made, parameters = bucket()
    whole = torch.randn(2, 4, 8)
    views = [put(made, p, piece) for p, piece in zip((parameters[0], parameters[2]), whole.unbind(0), strict=True)]
    assert in_place_of(whole, views) is None
    assert in_place_of(whole.transpose(1, 2), views) is None


def test_a_bucket_takes_what_is_left_once_the_rest_was_taken_over() -> None:
    made, parameters = bucket()
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    put(made, parameters[0], first)
    parameters[1].grad = second
    flat = made.fill()
    assert torch.equal(flat, torch.cat([first.flatten(), second.flatten(), torch.zeros(32)]))
    assert parameters[0].grad is None
    assert torch.equal(made.view_of(parameters[0]), first)
