"""Kernels that keep every full operand in one layout: bias, scale, cast, masks, add, activations, dropout, reductions.

What counts is the memory order of the widest operand; narrower ones (statistics, say) follow it, and vectors that are
parameters keep their declared order.
"""

from collections.abc import Callable, Iterator
from functools import partial

from autotuner.ir.form import Form, Layout
from autotuner.ir.formats import RAW, STRIDED_OF_MASKS
from autotuner.ir.kinds import KINDS, draws
from autotuner.ir.records import Candidate, Node, Subgraph
from autotuner.kernels.geometry import (
    HALVES,
    forms_by_number,
    letter_extents,
    letter_sides,
    memory_orders,
    merge,
    operand_letters,
    operand_numbers,
    operand_strides,
)
from autotuner.kernels.patterns import ParameterCasts
from autotuner.kernels.registry import KERNELS, Kernel

Refuses = Callable[[Subgraph, Candidate], str | None]


def widest(node: Node) -> str:
    """Return the letters of the widest operand."""
    return max(operand_letters(node), key=len)


def _operands(node: Node, symbols: str) -> set[int]:
    """Return the tensors that the pattern of a node's kind writes with one of these symbols."""
    if node.kind not in KINDS:
        return set()
    numbers = operand_numbers(node)
    return {numbers[place] for place in KINDS[node.kind].places(symbols, *letter_sides(node))}


def vectors(node: Node) -> set[int]:
    """Return the tensors that keep their declared order: biases, scales, masks over keys, their gradients, and what a
    program reads and makes."""
    return _operands(node, "SHD")


def dropout_masks(subgraph: Subgraph) -> set[int]:
    """Return the numbers of tensors that are dropout masks; a conversion that carries p is one of a mask."""
    converted = (node for node in subgraph.nodes if node.kind == "conversion" and node.attributes)
    masks = {number for node in converted for number in operand_numbers(node)}
    return masks.union(*(_operands(node, "M") for node in subgraph.nodes))


def drawn_masks(subgraph: Subgraph) -> set[int]:
    """Return the numbers of the dropout masks that a subgraph draws."""
    return {number for node in subgraph.nodes if draws(node.kind) for number in node.outputs}


def stored_as(layout: str, storage: str) -> str:
    """Return the form of a layout, "blh", in a storage format."""
    return str(Form(Layout(layout), storage))


def same_layouts(subgraph: Subgraph) -> Iterator[tuple[str, ...]]:
    """Enumerate memory orders of the widest operand; the others follow it; masks in each storage format."""
    node = subgraph.nodes[0]
    masks = dropout_masks(subgraph)
    lead = widest(node)
    fixed = vectors(node)
    for order in memory_orders(lead):
        row: dict[int, str] = {}
        for number, letters in zip(operand_numbers(node), operand_letters(node), strict=True):
            axes = subgraph.tensors[number].axes
            kept = letters if number in fixed else "".join(x for x in order if x in letters)
            row[number] = kept.translate(str.maketrans(letters, axes))
        for storage in STRIDED_OF_MASKS if masks & set(subgraph.boundary) else (RAW,):
            yield tuple(stored_as(row[n], storage) if n in masks else row[n] for n in subgraph.boundary)


def layouts_differ(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which operand lies in another order than the widest, or None if all agree (slices of stacks included)."""
    node = subgraph.nodes[0]
    forms = forms_by_number(subgraph, candidate)
    present = {number for number in operand_numbers(node) if number in forms}
    if any(forms[number].is_absent for number in present):
        return f"{node.kind} reads and writes every operand"
    extents = letter_extents(subgraph, node)
    pairs = [
        (number, letters, _order(forms[number], letters, subgraph.tensors[number].axes))
        for number, letters in zip(operand_numbers(node), operand_letters(node), strict=True)
        if number in present
    ]
    lead = max((order for _, _, order in pairs), key=len)
    for number, _, order in pairs:
        expected = [x for x in lead if x in order and extents[x] > 1]
        if number not in vectors(node) and [x for x in order if extents[x] > 1] != expected:
            return f"{node.kind} wants one layout; tensor {number} lies as {forms[number]}, not in the order {lead!r}"
    return None


def layouts_of_casts_differ(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say which cast has operands in different layouts, or None."""
    forms = forms_by_number(subgraph, candidate)
    for node in subgraph.nodes:
        source, made = (forms[number] for number in operand_numbers(node))
        if node.kind != "cast" or str(source) != str(made) or not source.is_raw:
            return f"it casts tensors as they lie; one lies as {source}, and its cast as {made}"
    return None


def axis_not_contiguous(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why a library normalisation would have to copy its input, or None if it can read it as it lies."""
    reason = layouts_differ(subgraph, candidate)
    if reason:
        return reason
    node = subgraph.nodes[0]
    strides = operand_strides(subgraph, node, forms_by_number(subgraph, candidate))[0]
    axes, extents = normalised(node), letter_extents(subgraph, node)
    dense = 1
    for axis in reversed(axes):  # innermost, in the order of the scale
        if strides[axis] != dense:
            return f"the library's {node.kind} copies unless axis {axis!r} is contiguous"
        dense *= extents[axis]
    return None


def normalised(node: Node) -> str:
    """Return the letters that a normalisation reduces over; "" for an operator of another kind."""
    kind = KINDS[node.kind]
    if kind.operator_class != "normalisation":
        return ""
    sides, letters = letter_sides(node), operand_letters(node)
    if "axis" in kind.attributes:
        return str(dict(node.attributes)["axis"])
    if places := kind.places("H", *sides):
        return letters[places[0]]
    rest = kind.places("R", *sides)
    return "".join(letter for letter in letters[0] if letter not in letters[rest[0]]) if rest else ""


def statistics_too_narrow(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why the library's layer norm is not the graph's, or None if it is."""
    x = subgraph.tensors[subgraph.nodes[0].inputs[0]]
    if x.dtype in HALVES:
        return f"torch keeps the statistics of a {x.dtype} layer norm in {x.dtype}; the graph keeps them in float32"
    return axis_not_contiguous(subgraph, candidate)


def sum_casts(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why the library's sum would copy its operand, or None if it reads it as it lies."""
    reason = layouts_differ(subgraph, candidate)
    if reason:
        return reason
    node = subgraph.nodes[0]
    dtype = subgraph.tensors[node.inputs[0]].dtype
    source, kept = operand_letters(node)
    strides = operand_strides(subgraph, node, forms_by_number(subgraph, candidate))[:1]
    if dtype in HALVES and merge([x for x in source if x not in kept], strides, letter_extents(subgraph, node)) is None:
        return f"torch casts a whole {dtype} operand to float32 unless the summed axes act as one"
    return None


def not_a_matrix(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why a bias gradient is not a matrix times a vector of ones, or None if it is."""
    node = subgraph.nodes[0]
    strides = operand_strides(subgraph, node, forms_by_number(subgraph, candidate))
    extents = letter_extents(subgraph, node)
    source, kept = operand_letters(node)
    rows = merge([x for x in source if x not in kept], strides[:1], extents)
    columns = merge(kept, strides, extents)
    if rows is None or columns is None:
        return "the summed or the kept axes do not act as one axis"
    if 1 not in (rows.strides[0], columns.strides[0]):
        return "neither the summed nor the kept axes are contiguous"
    return None


def halves_differ(subgraph: Subgraph, candidate: Candidate) -> str | None:
    """Say why a rotary embedding has no two halves, or None if it has."""
    node = subgraph.nodes[0]
    extent = letter_extents(subgraph, node)[str(dict(node.attributes)["axis"])]
    if extent % 2:
        return f"an axis of {extent} elements has no two halves"
    return layouts_differ(subgraph, candidate)


def _order(form: Form, letters: str, axes: str) -> str:
    return form.layout.axes.replace("*", "").translate(str.maketrans(axes, letters))


def _kernel(
    name: str,
    kind: str,
    function: str = "",
    refuses: Refuses = layouts_differ,
    *,
    module: str = "elementwise",
    numerics: str = "exact",
    pitched: bool = False,
) -> Kernel:
    """Return a kernel for one operator, which runs the function of this name, or else of the operator's kind."""
    runs = f"autotuner.kernels.torch.{module}:{function or kind}"
    return Kernel(name, (kind,), runs, refuses, numerics=numerics, layouts=same_layouts, pitched=pitched)


_pitched = partial(_kernel, pitched=True)
KERNELS.add(
    _pitched("torch_scale", "scale"),
    _pitched("torch_cast", "cast"),
    _pitched("torch_add", "add"),
    _pitched("torch_multiply", "multiply"),
    _pitched("torch_gelu_erf", "gelu_erf"),
    _pitched("torch_gelu_tanh", "gelu_tanh"),
    _pitched("torch_silu", "silu"),
    _pitched("torch_relu", "relu"),
    _pitched("torch_gelu_erf_grad", "gelu_erf_grad"),
    _pitched("torch_gelu_tanh_grad", "gelu_tanh_grad"),
    _pitched("torch_silu_grad", "silu_grad"),
    _pitched("torch_relu_grad", "relu_grad"),
    _pitched("torch_bias", "bias"),
    _pitched("torch_mask", "mask"),
    _pitched("torch_row_mask", "row_mask"),
    _pitched("torch_causal_mask", "causal_mask"),
    _pitched("torch_window_mask", "window_mask"),
    _pitched("torch_dropout", "dropout"),
    _pitched("torch_rotary", "rotary", refuses=halves_differ, module="rotary"),
    _pitched("torch_rotary_grad", "rotary_grad", refuses=halves_differ, module="rotary"),
    Kernel("torch_casts", (), "autotuner.kernels.torch.elementwise:casts", layouts_of_casts_differ,
           patterns=(ParameterCasts(),)),
    _pitched("torch_bias_grad", "bias_grad", refuses=sum_casts),
    _pitched("torch_bias_grad_ones", "bias_grad", "bias_grad_ones", not_a_matrix),
    _kernel("torch_bernoulli", "dropout_mask", "bernoulli", numerics="unbiased"),
    _kernel("torch_random_bits", "dropout_mask", "random_bits", numerics="unbiased"),
    _kernel("torch_softmax", "softmax"),
    _kernel("torch_softmax_grad", "softmax_grad"),
    _kernel("torch_sink_softmax", "sink_softmax"),
    _kernel("torch_sink_grad", "sink_grad"),
    # On CUDA the library keeps the statistics of 16-bit layer norms in float32, as the graph does.
    _kernel("torch_layer_norm", "layer_norm", refuses=statistics_too_narrow),
    _kernel("cuda_layer_norm", "layer_norm", refuses=axis_not_contiguous),
    _kernel("torch_layer_norm_grad_input", "layer_norm_grad_input", refuses=statistics_too_narrow),
    _kernel("cuda_layer_norm_grad_input", "layer_norm_grad_input", refuses=axis_not_contiguous),
    _kernel("torch_layer_norm_grad_parameters", "layer_norm_grad_parameters", refuses=statistics_too_narrow),
    _kernel("cuda_layer_norm_grad_parameters", "layer_norm_grad_parameters", refuses=axis_not_contiguous),
    _kernel("torch_rms_norm", "rms_norm", module="rms_norm"),
    _kernel("torch_rms_norm_grad_input", "rms_norm_grad_input", module="rms_norm"),
    _kernel("torch_rms_norm_grad_parameters", "rms_norm_grad_parameters", module="rms_norm"),
    _kernel("torch_normalised", "normalised", module="normalised"),
    _kernel("torch_normalised_grad_input", "normalised_grad_input", module="normalised"),
    _kernel("torch_normalised_grad_parameters", "normalised_grad_parameters", module="normalised"),
)  # fmt: skip
