"""Batches that a step layer to layer takes apart, and how large the parts become."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import autotuner
from autotuner.errors import InputError
from autotuner.runtime.devices import CpuRuntime
from autotuner.runtime.layer_to_layer.micro_batches import MicroBatches, SizeChoice
from autotuner.runtime.layer_to_layer.stash_choice import LayeredNeeds
from autotuner.runtime.layer_to_layer.times import LayerTimes
from autotuner.runtime.padding.rules import shifts_labels
from tests.runtime.test_layer_to_layer import Net, ScriptedMeter, adamw, loss_of, plain_step, times

SMALL: dict[str, int] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}


def rows(count: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(0, 11, (count, 5), generator=generator) for name in ("tokens", "labels")}


def gradients(model: nn.Module) -> torch.optim.SGD:
    """Return an optimizer that takes gradients away from parameters as they are."""
    return torch.optim.SGD(model.parameters(), lr=1.0, foreach=True)


def beside_whole(model: nn.Module, batch: Any, size: Any, loss: Any = None) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch, whole, and of a step that takes it apart; their updates are compared."""
    twin = copy.deepcopy(model)
    step = autotuner.layer_to_layer(twin, gradients(twin), loss, compiler=None, micro_batch=size)
    found = step(batch)
    whole = model(**batch).loss if loss is None else loss(model, batch)
    whole.backward()
    gradients(model).step()
    for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, mine, msg=name, rtol=1e-9, atol=1e-12)
    return whole.detach(), found


@pytest.mark.parametrize("size", [1, 2, 4, 6, 100])
def test_a_batch_in_parts_is_the_whole_batch(size: int) -> None:
    """With a smaller last part, too: six rows in parts of four."""
    whole, found = beside_whole(Net().double(), rows(6), size, loss_of)
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("kind", ["llama", "bert", "t5"])
@pytest.mark.parametrize("size", [1, 2])
def test_labels_that_do_not_count_weigh_nothing(kind: str, size: int) -> None:
    """Rows of one to five labels, and one of none, whose own loss is not a number, in models of transformers."""
    torch.manual_seed(0)
    model: Any
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, vocab_size=20))
    elif kind == "bert":
        model = BertForMaskedLM(
            BertConfig(**SMALL, vocab_size=20, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        )
    else:
        model = T5ForConditionalGeneration(
            T5Config(vocab_size=20, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
                     decoder_start_token_id=0)
        )  # fmt: skip
    ids = torch.randint(1, 20, (6, 7), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row in range(6):
        labels[row, row + 1 if row else 0 :] = -100
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    whole, found = beside_whole(model.double().train(), given, size)
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("name", [
    "LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "BloomForCausalLM", "MixtralForCausalLM",
    "BertLMHeadModel", "BertForMaskedLM", "ModernBertForMaskedLM", "DebertaV2ForMaskedLM", "XLNetLMHeadModel",
])  # fmt: skip
def test_models_that_predict_the_next_token_have_no_use_for_a_first_label(name: str) -> None:
    """Its own loss says so: labels of the first tokens alone are none, and a mean of none is no number."""
    kind = getattr(transformers, name)
    given = SMALL | {"num_hidden_layers": 1, "n_layer": 1, "num_key_value_heads": 2, "pad_token_id": 0}
    given |= {"d_model": 16, "n_head": 2, "d_inner": 32} if name.startswith("XLNet") else {"n_head": 2}
    config = kind.config_class(vocab_size=20, is_decoder=name == "BertLMHeadModel", **given)
    model = kind(config).train()
    labels = torch.full((2, 5), -100)
    labels[:, 0] = 1
    loss = model(input_ids=torch.randint(1, 20, (2, 5)), labels=labels).loss
    assert shifts_labels(model) == (not bool(loss.isfinite()))
    assert not shifts_labels(Net())


def test_what_all_rows_share_is_not_taken_apart() -> None:
    shared, scalar = torch.arange(5)[None], torch.tensor(3.0)
    given = {
        "ids": torch.arange(8).view(4, 2),
        "positions": shared,
        "scale": scalar,
        "name": "x",
        "pair": [torch.ones(4)],
    }
    parts, choice = MicroBatches(2, shifts=False).parts([given])
    assert choice is None
    assert [part.divisor for part in parts] == [2.0, 2.0]
    assert [part.batch["ids"].tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert all(part.batch["positions"] is shared and part.batch["scale"] is scalar for part in parts)
    assert [part.batch["pair"][0].shape[0] for part in parts] == [2, 2]


def test_several_batches_are_taken_apart_and_their_mean_is_the_loss() -> None:
    parts, _ = MicroBatches(2, shifts=False).parts([rows(2), rows(4, 1)])
    assert [part.divisor for part in parts] == [2.0, 4.0, 4.0]


def test_a_batch_without_labels_that_count_stays_whole() -> None:
    given = {"tokens": torch.zeros(4, 5), "labels": torch.full((4, 5), -100)}
    (part,), _ = MicroBatches(1, shifts=False).parts([given])
    assert part.batch is given


@pytest.mark.parametrize("batch, words", [
    ({"ids": torch.zeros(4, 2), "positions": torch.zeros(3, 4, 2)},
     r"^micro_batch takes batches apart along the first axis, where the tensors of this one have 3 and 4 rows: give "),
    ({"ids": torch.zeros(4, 2), "what": object()}, r"^micro_batch goes with batches of tensors, .* holds a object"),
])  # fmt: skip
def test_batches_that_have_no_rows_are_refused(batch: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        MicroBatches(2, shifts=False).parts([batch])


@pytest.mark.parametrize("given", [0, -1, 1.5, "most", True])
def test_a_size_that_is_none_is_refused(given: Any) -> None:
    model = Net()
    with pytest.raises(
        InputError, match=rf"^micro_batch={given!r}: give a number of rows, 'auto', or None for batches"
    ):
        autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None, micro_batch=given)


def settled(
    sizes: list[int], seconds: dict[int, float], room: int = 1 << 30, **of_last: Any
) -> tuple[list[int], SizeChoice]:
    """Return the size of each step until it stays, where a step of a size takes so long behind a first one."""
    choice, used = SizeChoice(sizes), []
    while not choice.is_settled:
        used.append(choice.size)
        measured = seconds[choice.size] if used.count(choice.size) > 1 else 100.0
        choice.note(times(measured=measured, **of_last), lambda _, other: other <= room)
        assert len(used) < 50
    return used, choice


def test_sizes_grow_as_long_as_that_pays() -> None:
    used, choice = settled([1, 2, 4, 8, 16], {1: 5.0, 2: 4.0, 4: 3.0, 8: 2.99, 16: 1.0})
    assert used == [1] * 3 + [2] * 3 + [4] * 3 + [8] * 3
    assert choice.size == 4  # as fast as 8 within 2 %, in less memory
    assert choice.seconds == {1: 5.0, 2: 4.0, 4: 3.0, 8: 2.99}
    assert (
        str(choice) == "micro-batches of 4 (a step with each size, 1: 5,000 ms, 2: 4,000 ms, 4: 3,000 ms, 8: 2,990 ms)"
    )


def test_sizes_grow_no_further_than_there_is_room() -> None:
    used, choice = settled([1, 2, 4, 8], {1: 5.0, 2: 4.0, 4: 3.0}, room=2)
    assert (used[-1], choice.size) == (2, 2)


def test_a_larger_size_that_is_slower_is_left_again() -> None:
    used, choice = settled([1, 2, 4], {1: 5.0, 2: 6.0})
    assert (used[-1], choice.size) == (2, 1)


def test_sizes_stay_where_the_layers_do_not_bound_the_step() -> None:
    used, choice = settled([1, 2, 4], {1: 5.0}, down_forward=4.0, down_backward=4.0)
    assert (set(used), choice.size) == ({1}, 1)
    assert settled([1, 2], {1: 5.0, 2: 4.0}, down_forward=4.0)[1].size == 2  # backward computes for longer


def test_sizes_divide_the_rows() -> None:
    def of(count: int) -> list[int]:
        _, choice = MicroBatches("auto", shifts=False).parts([rows(count)])
        assert choice is not None
        return list(choice.sizes)

    assert (of(1), of(12), of(7), of(16)) == ([1], [1, 2, 4, 12], [1, 7], [1, 2, 4, 8, 16])


def test_another_number_of_rows_begins_where_the_first_has_ended() -> None:
    micro_batches = MicroBatches("auto", shifts=False)

    def choice(count: int) -> SizeChoice:
        _, found = micro_batches.parts([rows(count)])
        assert found is not None
        return found

    def end(found: SizeChoice, room: int) -> None:
        while not found.is_settled:
            found.note(times(measured=1 / found.size), lambda _, other: other <= room)

    end(choice(4), room=100)
    assert choice(4).size == 4
    assert (choice(2).size, choice(2).is_settled) == (2, True)  # such as an epoch's last batch
    more = choice(16)
    assert (more.size, more.is_settled) == (4, False)  # four were all, so that more may be faster
    end(more, room=8)
    assert more.seconds.keys() == {4, 8}
    assert (choice(32).size, choice(32).is_settled) == (8, True)
    assert (choice(12).size, choice(12).is_settled) == (4, True)
    _, other = micro_batches.parts([{"tokens": torch.zeros(16, 9)}])
    assert other is not None
    assert (other.size, other.is_settled) == (1, False)  # longer rows


def test_room_is_what_a_larger_part_can_need_at_most() -> None:
    needs = LayeredNeeds(budget_bytes=6_400, least_bytes=3_000, inputs_bytes=0, before_bytes=1_000)
    assert [needs.leaves_room_for(each) for each in (2, 2.6, 2.7)] == [True, True, False]  # of 6,300


def test_steps_find_their_size() -> None:
    """Twelve rows: in every step the loss is that of the whole batch, whatever the size is."""
    torch.manual_seed(0)
    model = Net().double()
    twin = copy.deepcopy(model)
    step = autotuner.layer_to_layer(twin, adamw(twin), loss_of, compiler=None, micro_batch="auto")
    own = adamw(model)
    for number in range(14):
        given = rows(12, number)
        whole = plain_step(model, own, given)
        torch.testing.assert_close(step(given), whole, rtol=1e-9, atol=1e-12)
    (choice,) = step.sizes
    assert choice.is_settled
    assert choice.size == min(
        size for size, seconds in choice.seconds.items() if 0.98 * seconds <= min(choice.seconds.values())
    )
    assert f"; micro-batches of {choice.size} (a step with each size, 1: " in str(step)


@pytest.mark.parametrize("room, most", [(25_000, 4), (15_000, 1)])
def test_the_device_s_room_is_the_budget_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, room: int, most: int
) -> None:
    """A step needs 10,050 bytes, of which 1 was there before; twice the rows may need twice of that."""
    monkeypatch.setattr(CpuRuntime, "has_own_memory", True)
    monkeypatch.setattr(CpuRuntime, "meter", lambda _: ScriptedMeter(10_000))
    monkeypatch.setattr(CpuRuntime, "room_bytes", lambda _: room)
    note = SizeChoice.note

    def faster(choice: SizeChoice, of: LayerTimes, has_room: Any) -> None:
        note(choice, replace(of, measured=1 / choice.size), has_room)

    monkeypatch.setattr(SizeChoice, "note", faster)
    model = Net()
    step = autotuner.layer_to_layer(model, adamw(model), loss_of, compiler=None, micro_batch="auto")
    for _ in range(9):
        step(rows(4))
    (choice,) = step.sizes
    assert max(choice.seconds) == most
    assert all(needs.budget_bytes == room for needs in step.needs)
