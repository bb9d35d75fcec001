"""Matrix products: every layout row against the reference, no operand copied, and refusals that say why."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autotuner.ir.form import Form
from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.kernels import KERNELS
from autotuner.kernels.canonical import canonical
from autotuner.kernels.geometry import contraction_layouts, operand_letters
from tests.kernels.calls import ODD, ROOMY, admitted, copied, faults, hidden_copies, layer, prepare

# At least as many calls over three variants of the layer: each row of the rule, and what the search space adds to them.
COUNTS = {
    "torch_matmul": 1100,
    "torch_matmul_loop": 120,
    "torch_matmul_bias": 124,
    "torch_matmul_add": 64,
    "torch_matmul_scale": 192,
    "torch_matmul_loop_scale": 15,
}
LARGE = {"b": 8, "l": 512, "h": 1024, "n": 16, "p": 64, "f": 4096}


def contractions(extents: dict[str, int], dtype: str = "float32") -> list[Subgraph]:
    graph = layer(extents, dtype)
    return [graph.subgraph([o], o.inputs, o.outputs) for o in graph.operators if o.kind == "contraction"]


def refusal(kernel: str, subgraph: Subgraph, *forms: str) -> str | None:
    return KERNELS[kernel].refuses(subgraph, Candidate(kernel, forms))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_every_layout_row_equals_the_reference(kernel: str) -> None:
    calls = admitted(kernel, ROOMY)
    assert len(calls) >= COUNTS[kernel]
    assert faults(calls) == {}


@pytest.mark.parametrize("kernel", COUNTS)
def test_every_layout_row_of_a_small_layer_equals_the_reference(kernel: str) -> None:
    calls = admitted(kernel, ODD | {"b": 2, "n": 3, "p": 2}, variants=[0])  # a loop is over the shorter of b and n
    assert calls
    assert faults(calls) == {}


@pytest.mark.parametrize("kernel", ["torch_matmul_loop_inner", "torch_matmul_loop_inner_scale"])
def test_a_loop_runs_over_the_shorter_batch_axis(kernel: str) -> None:
    windows = ODD | {"b": 7, "n": 2}
    calls = admitted(kernel, windows, variants=[0])
    assert calls
    assert faults(calls) == {}
    assert hidden_copies(calls) == {}
    outer = kernel.replace("_inner", "")
    assert not admitted(outer, windows, variants=[0])
    assert admitted(outer, windows | {"b": 2}, variants=[0])
    assert not admitted(kernel, windows | {"b": 2}, variants=[0])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_bfloat16_equals_the_reference_within_its_tolerance(kernel: str) -> None:
    calls = admitted(kernel, ROOMY, "bfloat16", [0])[::3]
    assert calls
    assert faults(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_no_operand_is_copied(kernel: str) -> None:
    calls = admitted(kernel, ROOMY, "float32", [0])
    assert calls
    assert hidden_copies(calls) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_no_operand_of_16_bits_is_cloned(kernel: str) -> None:
    # What oneDNN allocates here is where it packs blocks of its operands; BLAS does so in memory that torch cannot see.
    calls = admitted(kernel, ROOMY, "bfloat16", [0])
    assert [call.candidate.forms for call, found in copied(calls) if found.clones] == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_batched_matrices_of_16_bits_that_torch_would_copy_are_refused(dtype: str) -> None:
    scores = next(s for s in contractions(ROOMY, dtype) if operand_letters(s.nodes[0])[2] == "acbe")
    assert refusal("torch_matmul", scores, "acbd", "acdb", "abcd") is None
    for forms, which in ((("bacd", "acdb", "abcd"), "first"), (("acbd", "dacb", "abcd"), "second")):
        assert refusal("torch_matmul", scores, *forms) == (
            f"torch copies the {which} operand: batched {dtype} matrices must be dense, one behind the other"
        )
    assert refusal("torch_matmul_loop", scores, "abcd", "abcd", "abcd") == (
        f"torch copies the first operand: batched {dtype} matrices must be dense, one behind the other"
    )


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what is handed to the library."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)]
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("kernel", COUNTS)
def test_the_library_gets_views_of_the_operands_with_a_contiguous_matrix_axis(kernel: str) -> None:
    for call in admitted(kernel, ROOMY, "float32", [0]):
        made = prepare(call)
        operands = {t.untyped_storage().data_ptr() for t in (*made.inputs, *made.outputs) if t is not None}
        with Watch() as watch:
            made.run()
        assert len(watch.seen) >= 3
        assert {tensor.untyped_storage().data_ptr() for tensor in watch.seen} <= operands
        wide = [tensor for tensor in watch.seen if 0 not in tensor.stride()]
        assert all(1 in tensor.stride()[-2:] for tensor in wide)


def test_a_training_layer_has_1248_layout_triples() -> None:
    rows = [list(contraction_layouts(subgraph.nodes[0])) for subgraph in contractions(LARGE)]
    assert len(rows) == 24
    assert sum(map(len, rows)) == 1248
    assert all(len(set(own)) == len(own) for own in rows)


@pytest.mark.slow
def test_of_1248_layout_triples_232_are_distinct_calls() -> None:
    # The paper counts 404 for its 18 contractions. Here query, key and value are three operators with the same calls,
    # and candidates that differ only in how they name or split their axes are one.
    keys = set()
    for subgraph in contractions(LARGE):
        for row in KERNELS["torch_matmul"].layouts(subgraph):
            assert refusal("torch_matmul", subgraph, *row) is None
            keys.add(canonical(subgraph, Candidate("torch_matmul", row)).key)
    assert len(keys) == 232


def product(spec: str, *shapes: tuple[int, ...], follower: Node | None = None) -> Subgraph:
    tensors = tuple(TensorType(shape, "float32") for shape in shapes)
    node = Node("contraction", spec, (0, 1), (len(tensors) - 1 if follower else 2,))
    if follower is None:
        return Subgraph((node,), tensors, (0, 1), (2,))
    return Subgraph((node, follower), tensors, (0, 1, 2), (3,))


PROJECTION = product("abc,dec->abde", (2, 3, 4), (5, 6, 4), (2, 3, 5, 6))


@pytest.mark.parametrize(
    "forms, reason",
    [
        (("abc", "abc", "abcd"), None),
        (("abc", "cab", "cdab"), None),
        (("abc", "abc", "abdc"), "the column axes 'de' do not act as one axis in every operand"),
        (("acb", "abc", "abcd"), "the row axes 'ab' do not act as one axis in every operand"),
        (("abc", "abc", "cabd"), "the column axes 'de' do not act as one axis in every operand"),
        (("abc", "abc*@0/2", "abcd"), "the second operand has no contiguous matrix axis: strides (2, 8)"),
        (("absent", "abc", "abcd"), "a matrix product reads and writes every operand"),
    ],
)
def test_what_is_not_one_matrix_product_is_refused_in_a_sentence(forms: tuple[str, ...], reason: str | None) -> None:
    assert refusal("torch_matmul", PROJECTION, *forms) == reason


def test_a_bias_in_another_order_than_the_product_is_refused() -> None:
    biased = product("abc,dec->abde", (2, 3, 4), (5, 6, 4), (5, 6), (2, 3, 5, 6), (2, 3, 5, 6),
                     follower=Node("bias", "abcd,cd->abcd", (4, 2), (3,)))  # fmt: skip
    assert refusal("torch_matmul_bias", biased, "abc", "abc", "ab", "abcd") is None
    assert refusal("torch_matmul_bias", biased, "abc", "bac", "ab", "abdc") == (
        "the bias lies as ab, in another order than the product's axes 'cd'"
    )


def test_an_addend_in_another_layout_than_the_product_is_refused() -> None:
    added = product(
        "ab,bc->ac", (2, 3), (3, 4), (2, 4), (2, 4), (2, 4), follower=Node("add", "ab,ab->ab", (2, 4), (3,))
    )
    assert refusal("torch_matmul_add", added, "ab", "ab", "ab", "ab") is None
    assert refusal("torch_matmul_add", added, "ab", "ab", "ba", "ab") == "what is added lies as ba, the product as ab"


def test_a_loop_wants_two_batch_axes() -> None:
    assert refusal("torch_matmul_loop", PROJECTION, "abc", "abc", "abcd") == (
        "'abc,dec->abde' has not exactly two batch axes"
    )
    for kernel in ("torch_matmul_loop", "torch_matmul_loop_inner"):
        assert list(KERNELS[kernel].layouts(PROJECTION)) == []


@pytest.mark.slow
def test_pitched_operands_are_in_the_space() -> None:
    pitched = {
        kernel: sum(any(Form.parse(text).stack for text in call.candidate.forms) for call in admitted(kernel, ROOMY))
        for kernel in COUNTS
    }
    # What is added lies in no stack; scores as one batched product want heads before rows, and stacks lie by rows.
    assert [kernel for kernel, count in pitched.items() if not count] == ["torch_matmul_add", "torch_matmul_scale"]


def test_a_pitched_product_leaves_its_siblings_alone() -> None:
    call = Call(PROJECTION, Candidate("torch_matmul", ("abc", "abc", "ab*cd@1/3")))
    made = prepare(call)
    (output,) = (tensor for tensor in made.outputs if tensor is not None)
    whole = output.as_strided((2, 3, 3, 5, 6), (270, 90, 30, 6, 1), 0).fill_(7.0)
    made.run()
    assert torch.equal(whole[:, :, [0, 2]], torch.full((2, 3, 2, 5, 6), 7.0))
    assert not bool((whole[:, :, 1] == 7.0).any())
