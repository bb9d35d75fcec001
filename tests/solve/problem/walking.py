"""A plan walked step by step: an independent check that what each step reads is there, in the form that it asks for."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from autotuner.ir.graph import Graph
from autotuner.plan.step import AGAIN, Step, tensor_of


def contradictions(graph: Graph, given: Mapping[str, tuple[str, ...]], steps: Sequence[Step]) -> list[str]:
    """Return what is wrong with a plan, in sentences; nothing where it can run."""
    return [*_order(graph, given, steps), *_coverage(graph, steps)]


def _order(graph: Graph, given: Mapping[str, tuple[str, ...]], steps: Sequence[Step]) -> Iterator[str]:
    there: dict[str, set[str]] = {}
    stored: dict[str, str] = {}
    for step in steps:
        label = "+".join(step.operators) or f"conversion of {step.inputs[0][0]}"
        for name, form in step.inputs:
            if tensor_of(name) not in graph.producers and form not in there.get(name, ()):
                if form not in given.get(name, ()) or stored.setdefault(name, form) != form:
                    yield f"{label} reads {name} from outside as {form}, it is stored as {stored.get(name)}"
                there.setdefault(name, set()).add(form)
            elif form not in there.get(name, ()):
                yield f"{label} reads {name} as {form}, it lies as {sorted(there.get(name, ()))}"
        for name, form in step.outputs:
            if form in there.get(name, ()):
                yield f"{label} makes {name} as {form} again"
            if not step.is_conversion and name in there:
                yield f"{label} makes {name}, which was made already"
            there.setdefault(name, set()).add(form)
        if step.is_conversion and [tensor_of(step.inputs[0][0])] != [tensor_of(name) for name, _ in step.outputs]:
            yield f"{label} makes another tensor"
    for name in graph.outputs:
        if not there.get(name, set()) & set(given[name]):
            yield f"the caller gets {name} as one of {given[name]}, it lies as {sorted(there.get(name, ()))}"


def _coverage(graph: Graph, steps: Sequence[Step]) -> Iterator[str]:
    named = {operator.name: operator for operator in graph.operators}
    times = Counter(name for step in steps if not step.again for name in step.operators)
    for name in named:
        if times[name] != 1:
            yield f"operator {name} is computed {times[name]} times"
    phases = [step.phase for step in steps if not step.is_conversion]
    if phases != sorted(phases, reverse=True):
        yield "a forward step comes after a backward one"
    for step in steps:
        if step.again and (step.phase, {named[name].phase for name in step.operators}) != ("backward", {"forward"}):
            yield f"step {step.operators} repeats in {step.phase} what is no forward operator"
        known = {tensor_of(name) for name, _ in step.inputs}
        for name in step.recomputed + step.operators:
            for tensor in named[name].inputs:
                if tensor not in known and not graph.tensors[tensor].optional:
                    yield f"{name} reads {tensor}, which its step {step.operators} neither reads nor makes"
            known |= set(named[name].outputs)
        made = {AGAIN * step.again + tensor for name in step.operators for tensor in named[name].outputs}
        made |= {AGAIN + tensor for name in step.recomputed for tensor in named[name].outputs}
        strange = {name for name, _ in step.outputs} - made
        if strange and not step.is_conversion:
            yield f"step {step.operators} returns {sorted(strange)}, which it does not make"
