"""The tolerance lets rounding pass and nothing else."""

import pytest
import torch

from autotuner.ir.records import Call, Candidate, Node, Subgraph, TensorType
from autotuner.measure.tolerance import TOLERANCES, allowed, terms
from autotuner.measure.verification import deviation


def product(dtype: str, depth: int = 64) -> Call:
    a, b, c = (TensorType(extents, dtype) for extents in ((8, depth), (depth, 8), (8, 8)))
    subgraph = Subgraph((Node("contraction", "ab,bc->ac", (0, 1), (2,)),), (a, b, c), (0, 1), (2,))
    return Call(subgraph, Candidate("any", ("ab", "ab", "ab")))


@pytest.mark.parametrize("dtype", sorted(TOLERANCES))
@pytest.mark.parametrize("depth", [64, 1000])
def test_a_rounded_product_passes_and_one_that_lacks_a_term_does_not(dtype: str, depth: int) -> None:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    a, b = torch.randn(8, depth).to(kind), torch.randn(depth, 8).to(kind)
    call, exact = product(dtype, depth), a.double() @ b.double()
    assert deviation(call, a @ b, exact) is None
    reason = deviation(call, a[:, 1:] @ b[1:], exact)
    assert reason is not None
    assert "differs from the reference" in reason


def test_gelu_by_tanh_is_not_gelu_by_erf() -> None:
    tensor = TensorType((100,), "float32")
    call = Call(Subgraph((Node("gelu_erf", "a->a", (0,), (1,)),), (tensor, tensor), (0,), (1,)), Candidate("any", ()))
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    exact = torch.nn.functional.gelu(x.double())
    assert deviation(call, torch.nn.functional.gelu(x), exact) is None
    assert deviation(call, torch.nn.functional.gelu(x, approximate="tanh"), exact) is not None


@pytest.mark.parametrize(
    ("node", "count"),
    [
        (Node("contraction", "ab,bc->ac", (0, 1), (2,)), 5),
        (Node("bias_grad", "ab->b", (0,), (3,)), 3),
        (Node("softmax", "ab->ab", (0,), (4,), (("axis", "b"),)), 5),
        (Node("layer_norm_grad_input", "ab,ab,b,a,a->ab", (0, 0, 3, 5, 5), (4,)), 5),
        (Node("layer_norm_grad_parameters", "ab,ab,a,a->b,b", (0, 0, 5, 5), (3, 3)), 3),
        (Node("relu", "ab->ab", (0,), (4,)), 1),
    ],
)
def test_terms_are_counted_along_what_is_summed(node: Node, count: int) -> None:
    shapes = ((3, 5), (5, 7), (3, 7), (5,), (3, 5), (3,))
    tensors = tuple(TensorType(shape, "float32") for shape in shapes)
    assert terms(Subgraph((node,), tensors, node.inputs, node.outputs), node) == count


def test_more_operators_and_longer_sums_may_err_more() -> None:
    short, long = allowed(product("float32").subgraph, "float32"), allowed(product("float32", 4096).subgraph, "float32")
    assert short[0] == long[0]
    assert short[1] < long[1] < 1e-4


def test_an_infinity_that_the_reference_shares_is_right() -> None:
    call = product("float32")
    reference = torch.zeros(8, 8, dtype=torch.float64)
    reference[0, 0] = float("-inf")
    assert deviation(call, reference.float(), reference) is None
    assert deviation(call, torch.zeros(8, 8), reference) is not None


def test_what_is_computed_from_a_rounded_tensor_may_be_off_by_its_rounding() -> None:
    wide, narrow, mean = TensorType((3, 5), "bfloat16"), TensorType((3, 5), "bfloat16"), TensorType((3,), "float32")
    add = Node("add", "ab,ab->ab", (0, 0), (1,))
    norm = Node("layer_norm", "ab,b,b->ab,a,a", (1, 3, 3), (1, 2, 2))
    tensors = (wide, narrow, mean, TensorType((5,), "bfloat16"))
    alone = allowed(Subgraph((norm,), tensors, (1, 3), (2,)), "float32")
    behind = allowed(Subgraph((add, norm), tensors, (0, 3), (2,)), "float32")
    assert alone[0] < 1e-5
    assert behind == allowed(Subgraph((add, norm), tensors, (0, 3), (2,)), "bfloat16")
