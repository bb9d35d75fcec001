"""Programs of ATen calls, as operators of the kinds `program` and `pointwise` carry them, run and differentiated.

A call is allowed where torch's own schema and tags say that its result follows from its arguments alone: functional,
not random, of a shape that no value decides, and without a wait for the host.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autotuner.errors import GraphError, KernelError
from autotuner.ir.program import GETITEM, Program, is_dtype, is_value, value_number
from autotuner.ir.programmed import WITH_SHAPES
from autotuner.ir.records import ELEMENT_BYTES
from autotuner.kernels.torch.grouped import grouped_product, histogram, sorted_bytes

Function = Callable[..., Tensor]

_BY_ELEMENT = ("_to_copy.default", "to.dtype", "clone.default", "alias.default", "detach.default", "full_like.default",
               "zeros_like.default", "ones_like.default", "where.ScalarSelf", "where.ScalarOther",
               "where.Scalar")  # fmt: skip
"""Casts, and calls that act element by element without torch's tag."""
_INDEXED = ("index.Tensor", "_unsafe_index.Tensor", "repeat_interleave.self_int")
"""Calls whose result has a shape that values decide only for some arguments, which tracing finds."""
_UNWRITTEN = "empty empty_like empty_strided empty_permuted new_empty new_empty_strided empty_quantized"
_REFUSED = {"from_file": "it reads a file"} | dict.fromkeys(_UNWRITTEN.split(), "what it makes is not written")
_TAGS = {
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
    torch.Tag.data_dependent_output: "it waits for what the device computes",
    torch.Tag.dynamic_output_shape: "the shape of its result depends on values",
    torch.Tag.inplace_view: "it changes its operand",
}
_KEYS = torch._C.DispatchKey.__members__
_AUTOCAST = reduce(or_, (torch._C.DispatchKeySet(key) for name, key in _KEYS.items() if name.startswith("Autocast")))
_MOVED = ("view.default", "reshape.default", "_unsafe_view.default", "squeeze.dim", "unsqueeze.default")
BYTE_MAX = 255
_INSTEAD: Mapping[str, Callable[..., Tensor]] = {"_grouped_mm.default": grouped_product, "histc.default": histogram}
"""Calls that are computed in another way than by ATen itself, which lacks some types."""
FLOATS = {name: getattr(torch, name) for name in ELEMENT_BYTES}


@lru_cache(maxsize=4096)
def refusal(name: str) -> str | None:
    """Say why a program may not call an overload of aten, such as "mul.Tensor", or None if it may."""
    if name == GETITEM:
        return None
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(found, OpOverload):
        return f"torch {torch.__version__} has no such overload"
    if packet in _REFUSED:
        return _REFUSED[packet]
    schema = found._schema
    if schema.is_mutable:
        return "it changes its operands"
    for tag, reason in _TAGS.items():
        if tag in found.tags and not (tag is torch.Tag.dynamic_output_shape and name in _INDEXED):
            return reason
    if not schema.returns or any("Tensor" not in str(each.type) for each in schema.returns):
        return "it returns something else than tensors"
    names = {argument.name for argument in schema.arguments}
    if "running_mean" in names and not packet.endswith(("_functional", "_no_training")):
        return "it may change the statistics that it is given"
    return None


def acts_by_element(name: str) -> bool:
    """Tell whether torch says that one element of a call's result follows from the same one of its operands."""
    if name in _BY_ELEMENT:
        return True
    return name != GETITEM and refusal(name) is None and torch.Tag.pointwise in _overload(name).tags


def check_calls(program: Program, kind: str = "program") -> None:
    """Check that a program makes allowed calls only, and that they give what its text says.

    Nothing is computed: the calls run on tensors without data.

    Raises:
        GraphError: they do not; the message names the call.
    """
    for number, call in enumerate(program.calls):
        reason = refusal(call.name)
        if reason is None and kind not in WITH_SHAPES and not acts_by_element(call.name):
            reason = "it does not act element by element"
        if reason is not None:
            raise GraphError(f"call {number} of a {kind}, {call.name}, is not possible: {reason}")
    dtype, shape = program.output
    try:
        with FakeTensorMode():
            operands = [torch.empty(each.shape, dtype=FLOATS[each.dtype]) for each in program.inputs]
            made: Any = function_of(program)(*operands)
    except GraphError:
        raise
    except Exception as error:  # torch says in many ways that arguments do not fit
        said = str(error).strip().partition("\n")[0]
        raise GraphError(f"a program cannot run: {type(error).__name__}: {said}") from error
    if not isinstance(made, Tensor):
        raise GraphError(f"the result of a program, {program.result}, is {type(made).__name__} and no tensor")
    found = (str(made.dtype).removeprefix("torch."), tuple(made.shape))
    if found != (dtype, shape):
        raise GraphError(f"a program makes {found[0]} of shape {list(found[1])}; its text says {dtype}, {list(shape)}")


def function_of(program: Program, wide: bool = False) -> Function:
    """Return a program as a function of its inputs; where it is wide, all floating-point types inside are float64.

    Raises:
        GraphError: a call is not possible.
    """
    overloads = [None if call.name == GETITEM else _overload(call.name) for call in program.calls]
    narrow = set() if wide else _orders_of_bytes(program)
    instead = [sorted_bytes if place in narrow else _INSTEAD.get(call.name) for place, call in enumerate(program.calls)]

    def run(*inputs: Tensor) -> Tensor:
        device, values = inputs[0].device, list[Any](inputs)
        for call, overload, other in zip(program.calls, overloads, instead, strict=True):
            arguments = [_argument(each, values, wide) for each in call.arguments]
            if overload is None:
                values.append(arguments[0][arguments[1]])
                continue
            keywords = {name: _argument(each, values, wide) for name, each in call.keywords.items()}
            if _makes(overload) and not any(is_value(each) for each in call.arguments):
                keywords["device"] = device
                if wide and "dtype" not in keywords:
                    keywords |= _wide_default(overload, arguments)
            values.append((other or overload)(*arguments, **keywords))
        result: Tensor = values[value_number(program.result)]
        return result

    return run


def _orders_of_bytes(program: Program) -> set[int]:
    """Return the calls that sort integers between 0 and 255, as a program has clamped them."""
    found, bounded, count = set[int](), set[int](), len(program.inputs)
    for place, call in enumerate(program.calls):
        ends = call.arguments[1:]
        if call.name == "clamp.default" and [*map(type, ends)] == [int, int] and 0 <= ends[0] <= ends[1] <= BYTE_MAX:
            bounded.add(count + place)
        elif call.reads and call.reads[0] in bounded:
            if call.name in _MOVED:
                bounded.add(count + place)
            elif call.name == "sort.stable":
                found.add(place)
    return found


def gradients(function: Function, wrt: Sequence[int], grad: Tensor, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of some inputs of a program as a function, given that of the result; inputs that are not
    saved may hold anything."""
    rest = list(inputs)

    def of_wanted(*wanted: Tensor) -> Tensor:
        for place, tensor in zip(wrt, wanted, strict=True):
            rest[place] = tensor
        return function(*rest)

    with _transforms_allowed():
        made, pulled, *_ = torch.func.vjp(of_wanted, *(inputs[place] for place in wrt))
        found: tuple[Tensor, ...] = pulled(grad.reshape(made.shape))
    return found


def _transforms_allowed() -> AbstractContextManager[None]:
    """Let torch's transforms work inside of an operator of a library, which torch calls below them and below autograd.

    Autocast stays as it is.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(included, excluded & _AUTOCAST)
    return guard


def differentiated(program: Program) -> Program:
    """Return a program whose `saved` lists the inputs that its gradient reads; nothing is computed.

    Raises:
        GraphError: it cannot be differentiated.
    """
    if not program.wanted:
        return replace(program, saved=())
    try:
        with FakeTensorMode():
            operands = [torch.empty(each.shape or (2,), dtype=FLOATS[each.dtype]) for each in program.inputs]
            grad = torch.empty(program.output[1] or (2,), dtype=FLOATS[program.output[0]])
            function = function_of(program)
            traced = make_fx(lambda grad, *inputs: gradients(function, program.wanted, grad, inputs))(grad, *operands)
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        raise GraphError(f"a program has no gradient: {type(error).__name__}: {said}") from error
    traced.graph.eliminate_dead_code()
    read = [node for node in traced.graph.nodes if node.op == "placeholder"][1:]
    saved = tuple(place for place, node in enumerate(read) if any(not _reads_shape_only(each) for each in node.users))
    return replace(program, saved=saved)


def _reads_shape_only(node: torch.fx.Node) -> bool:
    name = getattr(node.target, "_opname", "")
    return name in ("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full")


@lru_cache(maxsize=4096)
def _overload(name: str) -> OpOverload[..., Any]:
    reason = refusal(name)
    if reason is not None:
        raise KernelError(f"a program cannot call {name}: {reason}")
    packet, _, overload = name.partition(".")
    found: OpOverload[..., Any] = getattr(getattr(torch.ops.aten, packet), overload)
    return found


@lru_cache(maxsize=4096)
def _makes(overload: OpOverload[..., Any]) -> bool:
    """Tell whether a call makes a tensor on a device that it is told."""
    return any(argument.name == "device" for argument in overload._schema.arguments)


def _wide_default(overload: OpOverload[..., Any], arguments: Sequence[Any]) -> dict[str, Any]:
    """Return float64 as the type of a factory call that would make torch's default type."""
    name = overload._schema.name.partition("::")[2]
    floats = name in ("ones", "zeros", "eye", "linspace", "logspace") or any(isinstance(a, float) for a in arguments)
    return {"dtype": torch.float64} if floats else {}


def _argument(given: Any, values: Sequence[Any], wide: bool) -> Any:
    if isinstance(given, str):
        if is_value(given):
            return values[value_number(given)]
        if is_dtype(given):
            dtype = getattr(torch, given.removeprefix("dtype:"))
            return torch.float64 if wide and dtype.is_floating_point else dtype
        return float(given.removeprefix("float:")) if given.startswith("float:") else given
    if isinstance(given, list | tuple):
        return [_argument(each, values, wide) for each in given]
    return given
