"""Batches that a step layer to layer splits, and how large the parts become."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autotuner
from autotuner.errors import BudgetError, InputError
from autotuner.runtime.devices import CpuRuntime
from autotuner.runtime.devices.cpu import DirectLink
from autotuner.runtime.layer_to_layer.micro_batches import MicroBatches, SizeChoice
from autotuner.runtime.layer_to_layer.stash_choice import StashChoice
from autotuner.runtime.layer_to_layer.times import LayerTimes
from autotuner.runtime.loss_items import items_of
from tests.runtime.test_layer_to_layer import Net, ScriptedMeter, adamw, loss_of, plain_step, times

SMALL: dict[str, Any] = {
    "vocab_size": 20, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "n_layer": 2, "n_head": 2, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
BOTH = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
OF_KINDS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "GPT2LMHeadModel": {"n_embd": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "BertForMaskedLM": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "T5ForConditionalGeneration": BOTH | {"decoder_start_token_id": 0},
    "XLNetLMHeadModel": {"d_model": 16, "d_inner": 32, "dropout": 0.0},
}


def made(name: str, **more: Any) -> Any:
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class(**SMALL | OF_KINDS.get(name, {}) | more)).double().train()


def rows(count: int, seed: int = 0, length: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 11, (count, length), generator=generator) for name in ("tokens", "labels")}


def ragged(count: int = 6) -> dict[str, Tensor]:
    """Return rows of one to five labels, and one of none, whose own loss is not a number."""
    ids = torch.randint(1, 20, (count, 7), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row in range(count):
        labels[row, row + 1 if row else 0 :] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)


def step_of(model: nn.Module, loss: Any = loss_of, **options: Any) -> Any:
    return autotuner.layer_to_layer(model, sgd(model), loss, compiler=None, **options)


def assert_is_whole(model: nn.Module, batch: Any, loss: Any = None, **options: Any) -> None:
    """Compare a step that splits a batch with one in one piece: its loss, and what it makes of the parameters."""
    twin = copy.deepcopy(model)
    found = step_of(twin, loss, **options)(batch)
    whole = model(**batch).loss if loss is None else loss(model, batch)
    whole.backward()
    sgd(model).step()
    torch.testing.assert_close(found, whole.detach(), rtol=1e-6, atol=1e-6)  # transformers' own losses are in float32
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, mine, msg=name, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4, np.int64(6), 100])
def test_a_batch_in_parts_is_the_whole_batch(size: int) -> None:
    """With a smaller last part, too: six rows in parts of four."""
    assert_is_whole(Net().double(), rows(6), loss_of, micro_batch_size=size)


@pytest.mark.parametrize("name", OF_KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_labels_that_do_not_count_weigh_nothing(name: str, size: int) -> None:
    assert_is_whole(made(name), ragged(), micro_batch_size=size)


def test_a_loss_that_is_divided_by_a_number_in_the_batch_is_not_divided_again() -> None:
    assert_is_whole(made("LlamaForCausalLM"), ragged() | {"num_items_in_batch": 9}, micro_batch_size=2)


@pytest.mark.parametrize("name", [
    "LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM", "MixtralForCausalLM",
    "BertLMHeadModel", "BertForMaskedLM", "ModernBertForMaskedLM", "DebertaV2ForMaskedLM", "XLNetLMHeadModel",
])  # fmt: skip
def test_models_that_predict_the_next_token_have_no_use_for_a_first_label(name: str) -> None:
    """Its own loss says so: labels of the first tokens alone are none, and a mean of none is no number."""
    model = made(name, num_hidden_layers=1, is_decoder=name == "BertLMHeadModel").float()
    labels = torch.full((2, 5), -100)
    labels[:, 0] = 1
    loss = model(input_ids=torch.randint(1, 20, (2, 5)), labels=labels).loss
    assert items_of(model, has_own_loss=False).shifts == (not bool(loss.isfinite()))


def own_loss(model: Any, batch: Any) -> Tensor:
    """Labels are shifted already."""
    return functional.cross_entropy(model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten())


def test_how_labels_count_is_asked_for_where_it_is_not_known() -> None:
    model = made("LlamaForCausalLM")
    with pytest.raises(
        InputError,
        match=r"^rows of this batch have 0 to 6 labels that count \(not -100\), and how the loss of this step",
    ):
        step_of(copy.deepcopy(model), own_loss, micro_batch_size=2)(ragged())
    assert_is_whole(
        model, ragged(), own_loss, micro_batch_size=2, loss_items=lambda part: int((part["labels"] != -100).sum())
    )


@pytest.mark.parametrize("name, more", [
    ("BertForPreTraining", {"next_sentence_label": torch.zeros(6, dtype=torch.int64)}),  # the sum of two means
    ("BertForTokenClassification", {"other_labels": torch.zeros(6)}),
])  # fmt: skip
def test_losses_of_several_labels_are_not_known(name: str, more: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match=rf"how the loss of {name} counts them is not known: give loss_items"):
        items_of(made(name), has_own_loss=False).of_rows(ragged() | more, 6)
    even = {"labels": torch.ones(6, 7, dtype=torch.int64)} | more
    assert items_of(made(name), has_own_loss=False).of_rows(even, 6) == [1] * 6


def test_a_model_whose_loss_is_another_one_than_usual_is_asked_about() -> None:
    model = made("LlamaForCausalLM")
    model.loss_function = lambda *_, **__: torch.zeros(())
    with pytest.raises(InputError, match="how the loss of LlamaForCausalLM counts them is not known"):
        items_of(model, has_own_loss=False).of_rows(ragged(), 6)


def parts(batch: Any, size: int = 2) -> list[Any]:
    return [each.batch for each in MicroBatches(size).split([batch])]


def test_what_all_rows_share_is_not_split() -> None:
    shared, scalar = torch.arange(5)[None], torch.tensor(3.0)
    given = {"ids": torch.arange(8).view(4, 2), "at": shared, "scale": scalar, "name": "x", "pair": [torch.ones(4)]}
    found = MicroBatches(2).split([given])
    assert [part.divisor for part in found] == [2.0, 2.0]
    assert [part.batch["ids"].tolist() for part in found] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(part.batch["at"] is shared and part.batch["scale"] is scalar for part in found)
    assert [part.batch["pair"][0].shape[0] for part in found] == [2, 2]
    assert [[each.shape[0] for each in part] for part in parts((torch.ones(4, 3), torch.ones(4)))] == [[2, 2], [2, 2]]


@pytest.mark.parametrize("other", [
    {"cu_seq_lens_q": torch.tensor([0, 3, 8, 12])}, {"position_ids": torch.zeros(3, 1, 12)},
    {"attention_mask": torch.ones(12, 12)}, {"pixel_values": torch.ones(16, 8)},
])  # fmt: skip
def test_one_row_stays_whole_whatever_lies_beside_it(other: dict[str, Tensor]) -> None:
    given = other | {"input_ids": torch.zeros(1, 12, dtype=torch.int64)}
    (part,) = parts(given, 1)
    assert part is given


def test_several_batches_are_split_and_their_mean_is_the_loss() -> None:
    assert [part.divisor for part in MicroBatches(2).split([rows(2), rows(4, 1)])] == [2.0, 4.0, 4.0]


def test_of_a_batch_without_labels_that_count_one_part_runs() -> None:
    given = rows(4) | {"labels": torch.full((4, 5), -100)}
    (part,) = MicroBatches(1, lambda _: 0).split([given])
    assert part.batch["tokens"].shape == (1, 5)


@pytest.mark.parametrize("batch, words", [
    ({"ids": torch.zeros(4, 2), "weight": torch.zeros(3)},
     r"^micro_batch_size splits batches by rows, of which ids has 4, and weight has 3 \(one that all rows share is"),
    ({"input_ids": torch.zeros(3, 2), "position_ids": torch.zeros(3, 3, 2)}, "position_ids has three axes, of which"),
    ({"ids": torch.zeros(2, 2), "lengths": [2, 1]}, "lengths is a list of 2: give micro-batches yourself"),
    ({"ids": torch.zeros(2, 2), "boxes": [{"at": torch.zeros(2, 4)}] * 2}, "boxes is a list of 2"),
    ({"ids": torch.zeros(2, 2), "targets": [torch.tensor(0.0), torch.tensor(1.0)]}, "targets is a list of 2"),
    ({"ids": torch.zeros(4, 2), "what": object()}, r"^micro_batch_size goes with batches of tensors, .* a object"),
])  # fmt: skip
def test_batches_whose_rows_are_not_known_are_refused(batch: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parts(batch)


@pytest.mark.parametrize("given", [0, -1, 1.5, "most", True])
def test_a_size_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(
        InputError, match=rf"^micro_batch_size={given!r}: give a number of rows, 'auto', or None for batches"
    ):
        step_of(Net(), micro_batch_size=given)


def test_means_over_a_batch_are_refused() -> None:
    model = Net()
    model.norm = nn.BatchNorm1d(8)
    with pytest.raises(InputError, match=r"^BatchNorm1d takes its mean over all rows of a micro-batch, so that"):
        step_of(model, micro_batch_size=2)
    with pytest.raises(InputError, match=r"^loss_items is for batches that a step splits: give micro_batch_size, too"):
        step_of(Net(), loss_items=len)


def settled(choice: SizeChoice, seconds: dict[int, float], room: int = 1 << 30, **of_last: Any) -> list[int]:
    """Return the size of each step until it stays, where a step of a size takes so long behind a first one."""
    used: list[int] = []
    while not choice.is_settled:
        used.append(choice.size)
        measured = seconds[choice.size] if used.count(choice.size) > 1 else 100.0
        choice.note(times(measured=measured, **of_last), lambda _, other: other <= room)
        assert len(used) < 50
    return used


def test_sizes_grow_as_long_as_that_pays() -> None:
    choice = SizeChoice([1, 2, 4, 8, 16])
    used = settled(choice, {1: 5.0, 2: 4.0, 4: 3.0, 8: 2.99, 16: 1.0})
    assert used == [1] * 3 + [2] * 3 + [4] * 3 + [8] * 3
    assert (choice.size, choice.is_limited) == (4, False)  # as fast as 8 within 2 %, in less memory
    assert choice.seconds == {1: 5.0, 2: 4.0, 4: 3.0, 8: 2.99}
    assert (
        str(choice) == "micro-batches of 4 (a step with each size, 1: 5,000 ms, 2: 4,000 ms, 4: 3,000 ms, 8: 2,990 ms)"
    )


def test_sizes_grow_no_further_than_there_is_room() -> None:
    choice = SizeChoice([1, 2, 4, 8])
    assert settled(choice, {1: 5.0, 2: 4.0, 4: 3.0}, room=2)[-1] == 2
    assert (choice.size, choice.is_limited) == (2, True)


def test_a_larger_size_that_is_slower_is_left_again() -> None:
    choice = SizeChoice([1, 2, 4])
    assert settled(choice, {1: 5.0, 2: 6.0})[-1] == 2
    assert choice.size == 1


def test_sizes_stay_where_the_layers_do_not_bound_the_step() -> None:
    choice = SizeChoice([1, 2, 4])
    assert set(settled(choice, {1: 5.0}, down_forward=4.0, down_backward=4.0)) == {1}
    assert settled(SizeChoice([1, 2]), {1: 5.0, 2: 4.0}, down_forward=4.0)[-1] == 2  # backward computes for longer


def choice_of(micro_batches: MicroBatches, *batches: Any) -> SizeChoice:
    micro_batches.split(batches)
    assert micro_batches.last is not None
    return micro_batches.last


@pytest.mark.parametrize("count, candidates, begins", [
    (1, [1], 1), (12, [1, 2, 4, 8, 12], 1), (7, [1, 2, 4, 7], 1), (16, [1, 2, 4, 8, 16], 1),
    (512, [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], 8),
])  # fmt: skip
def test_sizes_are_powers_of_two_and_the_whole(count: int, candidates: list[int], begins: int) -> None:
    choice = choice_of(MicroBatches("auto"), rows(count))
    assert (choice.candidates, choice.size) == (candidates, begins)


def test_other_batches_begin_where_the_first_have_ended() -> None:
    micro_batches = MicroBatches("auto")

    def state(*batches: Any) -> tuple[int, bool]:
        choice = choice_of(micro_batches, *batches)
        return choice.size, choice.is_settled

    settled(choice_of(micro_batches, rows(4)), {1: 4.0, 2: 2.0, 4: 1.0})
    assert state(rows(4, 1) | {"step": 7}) == (4, True)  # what is no tensor is no shape
    assert state(rows(3)) == (3, True)  # such as an epoch's last batch
    assert state(rows(4), rows(4)) == (4, True)
    assert state(rows(16)) == (4, False)  # four were all, so that more may be faster
    settled(choice_of(micro_batches, rows(16)), {4: 4.0, 8: 2.0}, room=8)
    assert [state(rows(count)) for count in (32, 31, 13, 5)] == [(8, True), (8, True), (8, True), (5, True)]
    assert state(rows(16, length=10)) == (2, False)  # twice as long: attention may need four times as much
    assert state(rows(16, length=3)) == (8, False)
    for length in range(11, 400):
        state(rows(2, length=length))
    assert len(micro_batches.choices) == 256


def test_room_is_what_a_larger_part_can_need_at_most() -> None:
    choice = StashChoice(6_400, lambda: None)
    choice.note("shape", ScriptedMeter(3_050), 0, "")
    assert [choice.has_room_for("shape", each) for each in (2, 2.1)] == [True, False]  # of 6,300, where 1 was before
    assert not StashChoice(None, lambda: 3_000).needs


def test_steps_find_their_size() -> None:
    """Twelve rows: in every step the loss is that of the whole batch, whatever the size is."""
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    step = autotuner.layer_to_layer(twin, adamw(twin), loss_of, compiler=None, micro_batch_size="auto")
    own = adamw(model)
    for number in range(16):
        given = rows(12, number)
        whole = plain_step(model, own, given)
        torch.testing.assert_close(step(given), whole, rtol=1e-9, atol=1e-12)
    choice = step.micro_batch_choice
    assert choice is not None
    assert choice.is_settled
    assert choice.size == min(
        size for size, seconds in choice.seconds.items() if 0.98 * seconds <= min(choice.seconds.values())
    )
    assert f"; micro-batches of {choice.size} (a step with each size, 1: " in str(step)


@pytest.fixture
def larger_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    note = SizeChoice.note

    def faster(choice: SizeChoice, of: LayerTimes, has_room: Any) -> None:
        note(choice, replace(of, measured=1 / choice.size), has_room)

    monkeypatch.setattr(SizeChoice, "note", faster)
    monkeypatch.setattr(CpuRuntime, "has_own_memory", True)


@pytest.mark.usefixtures("larger_is_faster")
@pytest.mark.parametrize("room, most", [(25_000, 4), (15_000, 1), (5_000, 1)])
def test_the_device_s_room_is_the_limit_where_no_budget_is_given(
    monkeypatch: pytest.MonkeyPatch, room: int, most: int
) -> None:
    """A step needs 10,050 bytes, of which 1 was there before; twice the rows may need twice of that."""
    monkeypatch.setattr(CpuRuntime, "meter", lambda _: ScriptedMeter(10_000))
    monkeypatch.setattr(CpuRuntime, "room_bytes", lambda _: room)
    step = step_of(Net(), micro_batch_size="auto")
    for _ in range(9):
        step(rows(4))
    assert max(step.micro_batch_choice.seconds) == most
    assert all(needs.budget_bytes == room for needs in step.needs)
    stashed = step_of(Net(), micro_batch_size="auto", stash="host")
    for _ in range(2):
        stashed(rows(4))
        assert stashed.stash_bytes > 0
    assert "of inputs of layers kept on the host" in str(stashed)


@pytest.mark.usefixtures("larger_is_faster")
def test_a_size_that_needs_more_than_the_budget_is_left_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1, 2 and 4 rows a part, the last ones need more than was foreseen: the step has run, and later ones have 2."""
    needed = iter([3_000, 5_000, 13_000])
    monkeypatch.setattr(CpuRuntime, "meter", lambda _: ScriptedMeter(next(needed)))
    step = step_of(Net(), micro_batch_size="auto", memory_budget=12_000)
    for _ in range(9):
        step(rows(4))
    choice = step.micro_batch_choice
    assert (step.steps, choice.size, choice.is_settled, set(choice.seconds)) == (9, 2, True, {1, 2})
    monkeypatch.setattr(CpuRuntime, "meter", lambda _: ScriptedMeter(13_000))
    with pytest.raises(BudgetError, match="give smaller micro-batches, or a larger budget"):
        step_of(Net(), micro_batch_size="auto", memory_budget=12_000)(rows(4))


@pytest.mark.usefixtures("larger_is_faster")
def test_a_size_without_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "has_own_memory", False)
    sizes: list[int] = []

    def scarce(model: Any, batch: Any) -> Tensor:
        sizes.append(batch["tokens"].shape[0])
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(model, batch)

    step = step_of(Net(), scarce, micro_batch_size="auto")
    for _ in range(6):
        step(rows(4))
    with pytest.raises(torch.OutOfMemoryError):
        step(rows(4))
    for _ in range(3):
        step(rows(4))
    assert sizes.count(4) == 1
    assert (step.micro_batch_choice.size, step.micro_batch_choice.is_settled) == (2, True)


@pytest.mark.usefixtures("larger_is_faster")
def test_memory_of_a_size_that_was_left_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuRuntime, "has_own_memory", False)
    held: list[int] = []
    made, release = DirectLink.host_bytes, DirectLink.release

    def makes(link: DirectLink, count: int) -> Tensor:
        held.append(count)
        return made(link, count)

    def releases(link: DirectLink, buffer: Tensor) -> None:
        held.remove(buffer.numel())
        release(link, buffer)

    model = Net()
    step = step_of(model, micro_batch_size="auto", stash="host")
    monkeypatch.setattr(DirectLink, "host_bytes", makes)
    monkeypatch.setattr(DirectLink, "release", releases)
    most = []
    for _ in range(15):
        step(rows(16))
        most.append(sum(held))
    assert step.micro_batch_choice.size == 16
    assert 0 < max(most) <= 1.25 * most[1]  # of the first size


@pytest.mark.slow
@pytest.mark.parametrize("size, least", [("auto", 10), (None, 8)])
def test_layers_are_compiled_for_as_many_sizes_as_are_tried(
    monkeypatch: pytest.MonkeyPatch, size: Any, least: int
) -> None:
    """Torch stops at eight."""
    lengths: set[int] = set()

    def compiled(graph: Any, inputs: Any, **_: Any) -> Any:
        lengths.update(each.shape[1] for each in inputs if isinstance(each, Tensor) and each.dim() == 3)
        return graph.forward

    monkeypatch.setattr("autotuner.api.layer_to_layer.compile_graph", compiled)
    torch._dynamo.reset()
    model = Net()
    step = autotuner.layer_to_layer(model, sgd(model), loss_of, micro_batch_size=size, compiler="eager")
    for length in range(5, 15):
        step(rows(2, length=length))
    assert len(lengths) == least
