"""Verification of a kernel against a float64 reference, before it is timed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from autotuner.ir.device import CPU, has_graphs
from autotuner.ir.form import Form
from autotuner.ir.records import Call
from autotuner.kernels.reference import evaluate
from autotuner.kernels.registry import Kernel, load
from autotuner.kernels.rules.elementwise import drawn_masks
from autotuner.kernels.torch.formats import decoded, encoded
from autotuner.measure.operands import Values, stored
from autotuner.measure.tolerance import TOLERANCES, allowed

Run = Callable[[], Any]
Tensors = Sequence[Tensor | None]

SIGMAS = 6.0
# A generator that compares 16 random bits with p meets it to half a step.
MASK_RESOLUTION = 2.0**-17
# Below this, two honest draws may well be equal.
DISTINCT_ELEMENTS = 256
DISTINCT_SHARE = 0.01
REAL = {getattr(torch, name) for name in TOLERANCES}
SEED = 20_240_229


class References:
    """Float64 results of subgraphs, kept for as long as their candidates are verified."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[Tensor | None]] = {}
        self._limits: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self.held_bytes = 0

    def clear(self) -> None:
        self._known.clear()
        self._limits.clear()
        self.held_bytes = 0

    def limit(self, call: Call, dtype: str, reference: Tensor) -> Tensor:
        """Return how far a result of a type may be from each element of a reference that is kept here."""
        key = (id(reference), dtype)  # which stays its own, because the reference is kept beside the limit
        if key not in self._limits:
            relative, absolute = allowed(call.subgraph, dtype)
            size = reference.abs()
            limit = size.mul(relative).add_(size.square_().mean().sqrt_().mul_(absolute))
            self._limits[key] = (limit, reference)
            self.held_bytes += limit.nbytes
        return self._limits[key][0]

    def prepare(self, call: Call, kernel: Kernel, values: Values) -> None:
        """Compute ahead of verifying what does not depend on what the kernel draws."""
        if not drawn_masks(call.subgraph):
            self.expected(call, kernel, values, {})

    def expected(self, call: Call, kernel: Kernel, values: Values, given: Mapping[int, Tensor]) -> Sequence[Any]:
        """Return the reference outputs for inputs as the candidate's forms store them, drawn masks taken as given."""
        forms = call.candidate.parsed_forms()[: len(call.subgraph.inputs)]
        # A seed is another mask in each memory order and for each generator; bytes and bits are the same one.
        meanings = tuple(form.format.meaning or str(form) for form in forms)
        key = (call.subgraph.signature, kernel.consistent, kernel.rounds, meanings)
        if not given and key in self._known:
            return self._known[key]
        wide = [self._wide(values, *pair) for pair in zip(call.subgraph.inputs, forms, strict=True)]
        found = evaluate(call.subgraph, load(kernel.rounds)(call.subgraph, wide) if kernel.rounds else wide, given)
        if not given:
            self._known[key] = found
            self.held_bytes += sum(tensor.nbytes for tensor in found if tensor is not None)
        return found

    @staticmethod
    def _wide(values: Values, number: int, form: Form) -> Tensor:
        return factors(values.meant(number, form), values, number)


def factors(value: Tensor, values: Values, number: int) -> Tensor:
    """Return a tensor in float64, a mask of 0 and 1 as the factors that it stands for; other booleans as they are."""
    if value.dtype == torch.bool:
        return value.double().mul_(1 / (1 - values.drop[number])) if number in values.drop else value
    return value.double()


def fault(
    call: Call, kernel: Kernel, run: Run, values: Values, references: References, inputs: Tensors, outputs: Tensors
) -> str | None:
    """Run a kernel, built on `inputs` and `outputs`, and say in a sentence what is wrong, or None if nothing is."""

    def results(seed: int, flipped: bool) -> Tensors:
        seed_device(values.device, seed)
        poison(outputs, flipped)
        run()
        return [None if output is None else output.clone() for output in outputs]

    is_queued = has_graphs(values.device.type)
    if is_queued and passes_at_once(call, kernel, run, values, references, inputs, outputs):
        return None
    first = results(SEED, False)
    reason = moved(call, outputs) or changed_input(call, values, inputs) or spilled(outputs)
    if reason:
        return reason
    drawn, meant = drawn_masks(call.subgraph), meaning(call, values, first)
    masks = {number: mask for number, mask in meant.items() if number in drawn}
    if drawn - set(masks):
        return "it draws a dropout mask that it does not return, so that its other results cannot be verified"
    if masks or any(output is not None and not output.is_floating_point() for output in first):
        reason = unrepeatable(first, results(SEED, True))
        if reason:
            return reason
    for number, mask in masks.items():
        p = values.drop[number]
        reason = implausible_mask(mask, p, kernel.drops(p))
        if reason:
            return f"the dropout mask {reason}"
    if any(mask.numel() >= DISTINCT_ELEMENTS and values.drop[number] >= DISTINCT_SHARE
           for number, mask in masks.items()):  # fmt: skip
        reason = seedless(masks, meaning(call, values, results(SEED + 1, False)))
        if reason:
            return reason
    given = {number: factors(mask, values, number) for number, mask in masks.items()}
    expected = references.expected(call, kernel, values, given)
    for place, number in enumerate(call.subgraph.outputs):
        if number in masks or number not in meant:
            continue
        result = meant[number]
        if result.dtype == torch.bool and number in values.drop:
            result = values.scaled(number, result)
        reason = deviation(call, result, projected(call, references, number, result, expected[place]))
        if reason:
            return f"output {place} {reason}"
    return None


def projected(call: Call, references: References, number: int, result: Tensor, reference: Tensor) -> Tensor:
    """Return what a reference is worth in a call's form of it, next to a result.

    Formats that project do so in steps. A value next to a step may come out on either side of it, so what counts is all
    that lies between the projections of the least and the greatest value that the tolerance allows.
    """
    places = zip(call.subgraph.boundary, call.candidate.parsed_forms(), strict=True)
    form = next(form for each, form in places if each == number)
    if not form.format.projects:
        return reference
    tensor = call.subgraph.tensors[number]
    limit = references.limit(call, str(result.dtype).removeprefix("torch."), reference)
    low, high = (
        decoded(encoded(reference + end, form, tensor), form, tensor, None).double() for end in (-limit, limit)
    )
    return result.double().clamp(torch.minimum(low, high), torch.maximum(low, high))


def passes_at_once(
    call: Call, kernel: Kernel, run: Run, values: Values, references: References, inputs: Tensors, outputs: Tensors
) -> bool:
    """Say whether nothing is wrong, as far as one number tells: the device is waited for once.

    False means that `fault` must look closer: something is wrong, masks are drawn, or the reference is not finite.
    """
    if drawn_masks(call.subgraph) or not all(output is None or output.dtype in REAL for output in outputs):
        return False
    seed_device(values.device, SEED)
    poison(outputs, False)
    run()
    if moved(call, outputs):
        return False
    forms = call.candidate.parsed_forms()
    doubts = [
        (tensor != values.stored(number, form)).any()
        for number, form, tensor in zip(call.subgraph.inputs, forms, inputs, strict=False)
        if tensor is not None
    ]
    doubts += [whole.isnan().sum() < outside for whole, outside in surroundings(outputs)]
    for reference, output in zip(references.expected(call, kernel, values, {}), outputs, strict=True):
        if output is not None:
            dtype = str(output.dtype).removeprefix("torch.")
            error = output.double().sub_(reference).abs_()
            doubts.append((error <= references.limit(call, dtype, reference)).all().logical_not_())
    return not bool(torch.stack(doubts).any())


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator from which kernels on a device draw."""
    if device.type == CPU:
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device).default_generators[device.index or 0].manual_seed(seed)


def meaning(call: Call, values: Values, outputs: Tensors) -> dict[int, Tensor]:
    """Return what a call's outputs stand for by number, axes in declared order, flat masks as booleans."""
    forms = call.candidate.parsed_forms()[len(call.subgraph.inputs) :]
    return {
        number: decoded(output, form, call.subgraph.tensors[number], values.drop.get(number))
        for number, form, output in zip(call.subgraph.outputs, forms, outputs, strict=True)
        if output is not None
    }


def poison(outputs: Tensors, flipped: bool) -> None:
    """Fill whole output buffers so that an element nobody writes shows: NaN, or a pattern that a second run flips."""
    for view in outputs:
        if view is None:
            continue
        if view.is_floating_point():
            _whole(view).fill_(float("nan"))
            continue
        drawn: dict[str, Any] = {
            "generator": torch.Generator(view.device).manual_seed(SEED),
            "device": view.device,
        }
        if view.dtype == torch.bool:
            view.copy_((torch.rand(view.shape, **drawn) < 0.5) ^ flipped)
        else:
            pattern = torch.randint(0, 256, view.shape, dtype=torch.uint8, **drawn)
            view.copy_(pattern ^ 0xFF if flipped else pattern)


def spilled(outputs: Tensors) -> str | None:
    """Say if a kernel wrote into its outputs' buffers outside its outputs (between the slices of a stack)."""
    if any(int(whole.isnan().sum()) < outside for whole, outside in surroundings(outputs)):
        return "it wrote beside its outputs, into another slice of their stack"
    return None


def surroundings(outputs: Tensors) -> Iterator[tuple[Tensor, int]]:
    """Yield buffers of which outputs are only a part, whole, and how many elements of each are no output."""
    buffers: dict[int, list[Tensor]] = {}
    for view in outputs:
        if view is not None and view.is_floating_point():
            buffers.setdefault(view.untyped_storage().data_ptr(), []).append(view)
    for views in buffers.values():
        whole = _whole(views[0])
        outside = whole.numel() - sum(view.numel() for view in views)
        if outside:
            yield whole, outside


def changed_input(call: Call, values: Values, inputs: Tensors) -> str | None:
    """Say which input a kernel modified, or None."""
    forms = call.candidate.parsed_forms()
    for place, (number, tensor) in enumerate(zip(call.subgraph.inputs, inputs, strict=True)):
        if tensor is not None and not torch.equal(tensor, values.stored(number, forms[place])):
            return f"it modified input {place}"
    return None


def moved(call: Call, outputs: Tensors) -> str | None:
    """Say which output a kernel has given another shape, or strides that are not its form's, or None."""
    forms = call.candidate.parsed_forms()[len(call.subgraph.inputs) :]
    for place, (number, form, output) in enumerate(zip(call.subgraph.outputs, forms, outputs, strict=True)):
        if output is None:
            continue
        lies = stored(call.subgraph.tensors[number], form)
        if (tuple(output.shape), tuple(output.stride())) != (lies.extents, lies.strides):
            return (
                f"it left output {place} with shape {tuple(output.shape)} and strides {tuple(output.stride())}; "
                f"form {form} of {lies.extents} has strides {lies.strides}"
            )
    return None


def implausible_mask(mask: Tensor, p: float, dropped: float) -> str | None:
    """Say why a tensor is no mask that scales for p and drops such a share, up to chance; None if it may be one."""
    if mask.dtype == torch.bool:
        kept = mask
    else:
        factor = 1 / (1 - p)
        kept = mask != 0
        epsilon = torch.finfo(mask.dtype).eps
        strange = kept & ~((mask.double() - factor).abs() <= 2 * epsilon * factor)
        if strange.any():
            return f"holds {float(mask[strange][0]):.6g}; it may hold 0 and {factor:.6g} only"
    share, count = float(kept.double().mean()), kept.numel()
    limit = SIGMAS * sqrt(dropped * (1 - dropped) / count) + MASK_RESOLUTION
    if abs(share - (1 - dropped)) > limit:
        return (
            f"keeps {share:.6f} of {count} elements; where p = {p} it is to keep {1 - dropped:.6f} within {limit:.6f}"
        )
    return None


def unrepeatable(first: Tensors, second: Tensors) -> str | None:
    """Say which output differs between two runs from one seed into oppositely filled memory, or None."""
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        if one is None or other is None:
            continue
        differs = (one != other) & ~(one.isnan() & other.isnan())
        if bool(differs.any()):
            count = int(differs.sum())
            return (
                f"output {place} differs in {count} of {one.numel()} elements between two runs from the same seed: "
                "it is not written in full, or not drawn from torch's generator"
            )
    return None


def seedless(masks: Mapping[int, Tensor], others: Mapping[int, Tensor | None]) -> str | None:
    """Say that a mask does not depend on the generator's seed, or None where all do."""
    for number, mask in masks.items():
        other = others[number]
        if mask.numel() >= DISTINCT_ELEMENTS and other is not None and torch.equal(mask, other):
            return "the dropout mask is the same whatever the generator's seed"
    return None


def deviation(call: Call, result: Tensor, reference: Tensor) -> str | None:
    """Say where a result is further from its reference than the tolerance allows, or None."""
    dtype = str(result.dtype).removeprefix("torch.")
    relative, absolute = allowed(call.subgraph, dtype) if dtype in TOLERANCES else (0.0, 0.0)
    got, wanted = result.double(), reference.double()
    size = wanted.abs()
    finite = size.isfinite()
    if not bool(finite.all()):
        size = torch.where(finite, size, 0.0)
    scale = float(size.square().sum().div(max(1, int(finite.sum()))).sqrt())
    error = (got - wanted).abs()
    fine = error <= relative * size + absolute * scale
    if bool(fine.all()):
        return None
    wrong = ~(fine | (got == wanted) | (got.isnan() & wanted.isnan()))
    count = int(wrong.sum())
    if count == 0:
        return None
    missing = wrong & ~got.isfinite() & finite
    if bool(missing.any()):
        where = tuple(missing.nonzero()[0].tolist())
        return (
            f"is {float(got[where])} in {int(missing.sum())} of {got.numel()} elements, first at {where}, where the "
            "reference is finite: not written, or not computed"
        )
    error = torch.where(wrong, error.nan_to_num(float("inf"), float("inf")), -1.0)
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    limit = relative * float(size[where]) + absolute * scale
    return (
        f"differs from the reference in {count} of {got.numel()} elements, most at {where}: {float(got[where]):.6g} "
        f"instead of {float(wanted[where]):.6g}, off by {float(error[where]):.3g} where {limit:.3g} is allowed"
    )


def _whole(view: Tensor) -> Tensor:
    """View the whole buffer that a boundary tensor lies in."""
    return view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
