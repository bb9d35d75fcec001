"""Prints, as JSON, what is wrong with attention by Triton programs where Triton's interpreter runs them on the CPU.

`TRITON_INTERPRET=1` has to be set before Triton is imported, and stays for a whole process. The layers are of float16,
which the interpreter multiplies; it does not multiply bfloat16.

    python -m tests.kernels.interpreted
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autotuner.ir.autodiff import training_graph
from autotuner.ir.graph import Graph, Operator, Tensor
from autotuner.ir.records import Call, Candidate, Scalar
from autotuner.ir.scores import soft_cap
from autotuner.kernels import KERNELS
from autotuner.kernels.registry import load
from autotuner.kernels.rules.attention import added_mask
from autotuner.kernels.rules.attention_triton import BACKWARD_PARAMS, FORWARD_PARAMS, WIDE
from autotuner.kernels.triton import attention
from autotuner.measure.operands import Values
from autotuner.measure.verification import References, fault
from autotuner.space.fusion import covers
from tests.kernels.calls import faults, layer, prepare

NAMES = {
    f"{name}{side}": params
    for name in ("triton_attention", WIDE)
    for side, params in (("", FORWARD_PARAMS), ("_grad", BACKWARD_PARAMS))
}
STACKED = "ab*cd"
WORDS = {"b": 2, "l": 96, "h": 32, "n": 2, "p": 16, "f": 32}
"""Rows and keys that tiles do not divide, and whole words of bits."""
ODD = WORDS | {"l": 37}
GROUPED = {"b": 2, "l": 96, "h": 32, "g": 2, "r": 3, "p": 16, "f": 32}
CASES: Mapping[str, tuple[Mapping[str, int], Mapping[str, Scalar]]] = {
    "dropout": (WORDS, {"p": 0.25}),
    "causal": (WORDS, {"p": 0.25, "model": "gpt-block"}),
    "key padding": (WORDS, {"p": 0.25, "attention_mask": True}),
    "odd": (ODD, {"p": 0.0}),
    "odd and causal": (ODD, {"p": 0.0, "model": "gpt-block"}),
    "odd and key padding": (ODD, {"p": 0.0, "attention_mask": True}),
    "whole tiles": (WORDS | {"b": 1, "l": 128}, {"p": 0.1}),
    "heads that share a key": (GROUPED, {"model": "llama-block"}),
    "odd heads that share a key": (GROUPED | {"l": 37}, {"model": "llama-block"}),
    "bias": (WORDS | {"q": 96, "k": 96}, {"p": 0.25, "model": "t5-block"}),
    "heads of 256 features": (WORDS | {"b": 1, "n": 1, "h": 256, "p": 256}, {"p": 0.25, "model": "gpt-block"}),
    "odd bias": (ODD | {"q": 37, "k": 37}, {"p": 0.0, "model": "t5-block"}),
}

WINDOW = (("before", 20), ("after", 3))
"""A query sees so many keys, before its own and behind it: some tiles in whole, some in part, some not at all."""
ADDED: Mapping[str, tuple[str, str, str, float] | tuple[str, str, str, float, float]] = {
    "bias with keys first": ("bias", "kqn", "bqnp", 0.0),
    "bias of a batch entry": ("bias", "bnqk", "bqnp", 0.0),
    "bias of all heads": ("bias", "qk", "bqnp", 0.25),
    "bias of heads that share a key": ("bias", "nrqk", "bqnrp", 0.0),
    "bias of all heads that share keys": ("bias", "qk", "bqnrp", 0.0),
    "mask over rows": ("mask", "bqk", "bqnrp", 0.0),
    "mask of each head": ("mask", "nrk", "bqnrp", 0.25),
    "heads before rows": ("bias", "nqk", "bnqp", 0.25),
    "rows before the batch": ("mask", "bk", "qbnp", 0.0),
    "soft cap and a mask over rows": ("mask", "bqk", "bqnrp", 0.0, 2.0),
    "soft cap and a mask of keys": ("mask", "bk", "bqnp", 0.25, 0.5),
    "soft cap of causal attention": ("causal_mask", "", "bqnp", 0.0, 1.0),
    "soft cap alone": ("", "", "bqnp", 0.25, 1.5),
    "bias of causal attention": ("bias+causal_mask", "nqk", "bqnp", 0.25),
    "mask of causal attention": ("mask+causal_mask", "bk", "bqnrp", 0.0),
    "one key for all heads": ("mask", "bqk", "bqrp", 0.25),
    "bias and a mask": ("bias+mask", "nqk+bqk", "bqnp", 0.0),
    "bias and a mask of keys": ("bias+mask", "nqk+bk", "bqnp", 0.25),
    "bias of all windows": ("bias", "qkn", "wbqnp", 0.25),
    "bias of all windows and a mask of each": ("bias+mask", "qkn+bqk", "wbqnp", 0.0),
    "mask of each window": ("mask", "bqk", "wbqnp", 0.0),
    "sinks": ("sinks", "", "bqnp", 0.0),
    "sinks of causal attention": ("causal_mask+sinks", "", "bqnp", 0.25),
    "sinks of heads that share a key, and a bias": ("bias+sinks", "bqk", "bqnrp", 0.0),
    "sinks and a mask of keys": ("mask+causal_mask+sinks", "bk", "bqnrp", 0.25),
    "window": ("window_mask", "", "bqnp", 0.0),
    "window of heads that share a key": ("window_mask", "", "bqnrp", 0.25),
    "window and a mask of keys": ("mask+window_mask", "bk", "bqnp", 0.25),
    "soft cap of a window": ("window_mask", "", "bqnp", 0.0, 1.0),
    "sinks of a window": ("window_mask+sinks", "", "bqnrp", 0.25),
}
"""Kinds and axes of what is added to the scores, axes of the query, the share of weights that is dropped, and what the
scores are capped at, where they are scaled as well."""


def adding(kind: str, axes: str, query: str, p: float = 0.0, cap: float = 0.0, length: int = 0) -> Graph:
    """Return attention that adds something to its scores, or has sinks, with its gradients."""
    length = length or (WORDS["l"] if p else ODD["l"])
    extents = {"w": 3, "b": 2, "n": 2, "r": 3, "q": length, "k": length, "p": 16}
    heads, windows = ("".join(letter for letter in letters if letter in query) for letters in ("nr", "w"))
    scores, weights = f"{windows}b{heads}qk", f"{windows}b{heads}q"
    key = f"{windows}bknp" if "n" in query else "bkp"
    given = {"query": query, "key": key, "value": key}
    made = {"scores": scores, "moved": scores, "weights": scores, "out": query}
    tensors = {name: Tensor(name, own, "float16", "input") for name, own in given.items()}
    tensors |= {name: Tensor(name, own, "float16", "activation") for name, own in made.items()}
    kinds = [each for each in kind.split("+") if each not in ("", "sinks")]
    along = (("query_axis", "q"), ("key_axis", "k"))
    hiding = {"causal_mask": along, "window_mask": (*along, *WINDOW)}
    adding_kinds = [each for each in kinds if each not in hiding]
    given_axes = dict(zip(adding_kinds, axes.split("+"), strict=False))
    for each in adding_kinds:
        tensors[each] = Tensor(each, given_axes[each], "float16", "input", constant=each == "mask")
    moving: list[Operator] = []
    last = "scores"
    if cap:
        program = (("program", soft_cap(cap, "float16").text),)
        moving = [
            Operator("scaled", "scale", f"{scores}->{scores}", ("scores",), ("scaled",), (("factor", 1.5),)),
            Operator("capped", "pointwise", f"{scores}->{scores}", ("scaled",), ("capped",), program),
        ]
        tensors |= {name: Tensor(name, scores, "float16", "activation") for name in ("scaled", "capped")}
        last = "capped"
    del tensors["moved"]
    for each in kinds:
        spec = ",".join((scores, *([given_axes[each]] if each in given_axes else [])))
        read = (last, *([each] if each in given_axes else []))
        name = f"moved_by_{each}"
        tensors[name] = Tensor(name, scores, "float16", "activation")
        moving.append(Operator(name, each, f"{spec}->{scores}", read, (name,), hiding.get(each, ())))
        last = name
    tensors["sums"] = Tensor("sums", weights, "float32", "auxiliary", optional=True)
    beside = ("sinks",) if "sinks" in kind else ()
    tensors |= {name: Tensor(name, heads, "float16", "parameter") for name in beside}
    tensors["sums"] = replace(tensors["sums"], optional=not beside)
    dropping: tuple[Operator, ...] = ()
    weighed = "dropped" if p else "weights"
    if p:
        share = (("p", p),)
        tensors["drawn"] = Tensor("drawn", scores, "float16", "auxiliary")
        tensors["dropped"] = Tensor("dropped", scores, "float16", "activation")
        dropping = (
            Operator("drawn", "dropout_mask", f"->{scores}", (), ("drawn",), share),
            Operator("dropped", "dropout", f"{scores},{scores}->{scores}", ("weights", "drawn"), ("dropped",), share),
        )
    operators = (
        Operator("scores", "contraction", f"{query},{key}->{scores}", ("query", "key"), ("scores",)),
        *moving,
        Operator(
            "weights", "sink_softmax" if beside else "softmax",
            f"{','.join((scores, *(heads for _ in beside)))}->{scores},{weights}", (last, *beside),
            ("weights", "sums"), (("axis", "k"),),
        ),
        *dropping,
        Operator("out", "contraction", f"{scores},{key}->{query}", (weighed, "value"), ("out",)),
    )  # fmt: skip
    return training_graph(Graph("made up", extents, tensors, operators, ("out",)))


def calls(extents: Mapping[str, int], dtype: str, *, wide: bool = False, **options: Scalar) -> dict[str, list[Call]]:
    """Return two calls of each kernel, with tiles of 64 rows, in a layer, as far as its rule admits them.

    They have its last layouts, and its first with query, key and value in one stack.
    """
    return calls_in(layer(extents, dtype, **options), wide=wide)  # type: ignore[arg-type]


def calls_in(graph: Graph, *, wide: bool = False) -> dict[str, list[Call]]:
    """Return the same in any graph."""
    named = {operator.name: operator for operator in graph.operators}
    found: dict[str, list[Call]] = {}
    for cover in covers(graph, tuple(NAMES), 8):
        members = [named[name] for name in cover.recomputed + cover.operators]
        subgraph = graph.subgraph(members, cover.inputs, cover.outputs)
        for kernel in cover.kernels:
            params = tuple(
                (name, {"rows": 64, "columns": 128 if wide else 64, "warps": 4, "stages": 2}[name.split("_")[-1]])
                for name in NAMES[kernel]
            )
            admitted = [
                row for row in KERNELS[kernel].layouts(subgraph)
                if KERNELS[kernel].refuses(subgraph, Candidate(kernel, row, params)) is None
            ]  # fmt: skip
            if not admitted:
                found[kernel] = []
                continue
            first, last = admitted[0], admitted[-1]
            place = 1 if kernel.endswith("_grad") else 0
            alike = [len(text) == len(STACKED) - 1 for text in first[place : place + 3]]
            sliced = [
                f"{STACKED}@{sum(alike[:index])}/{sum(alike)}" if alike[index] else first[place + index]
                for index in range(3)
            ]
            rows = (last, (*first[:place], *sliced, *first[place + 3 :]))
            candidates = (Candidate(kernel, row, params) for row in rows)
            found[kernel] = [Call(subgraph, c) for c in candidates if KERNELS[kernel].refuses(subgraph, c) is None]
    return found


def patch_once() -> None:
    """Have functions that a program calls not patch Triton's language at each call, which takes a sixth of the time.

    The interpreter never takes these patches back, so the first call of a function from each module is enough.
    """
    from triton.runtime import interpreter

    patched, patch = set(), interpreter._patch_lang

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = self.fn.__module__
        if module not in patched:
            patched.add(module)
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def hidden(known: Mapping[str, list[Call]]) -> dict[str, str]:
    """Return what is not finite where a sequence hides all its keys by the least bfloat16, by kernel."""
    found = {}
    for kernel, own in known.items():
        prepared = prepare(own[0])
        mask = prepared.inputs[-1]
        assert mask is not None
        wide = torch.zeros(mask.shape, dtype=torch.bfloat16)
        wide[0] = torch.finfo(torch.bfloat16).min
        run = KERNELS[kernel].builder()(own[0], [*prepared.inputs[:-1], wide], prepared.outputs)
        run()
        if not all(bool(t.isfinite().all()) for t in prepared.outputs if t is not None and t.is_floating_point()):
            found[kernel] = "a result is not finite"
    return found


def hidden_by_bias() -> dict[str, str]:
    """Return what is wrong where a bias hides the keys behind a query by the least float16, by kernel."""
    found = {}
    for kernel, (call, *_) in ((kernel, own) for kernel, own in calls_in(adding("bias", "nqk", "bqnp")).items() if own):
        number, _ = added_mask(call.subgraph)
        assert number is not None
        values = Values(call.subgraph)
        bias = values.inputs[number]
        bias[:, torch.ones(bias.shape[1:], dtype=torch.bool).triu(1)] = torch.finfo(torch.float16).min
        if KERNELS[kernel].consistent:
            load(KERNELS[kernel].consistent)(call.subgraph, [values.inputs[n] for n in call.subgraph.inputs])
        made = prepare(call, values)
        reason = fault(call, KERNELS[kernel], made.run, values, References(), made.inputs, made.outputs)
        if reason:
            found[kernel] = reason
    return found


if __name__ == "__main__":
    patch_once()
    attention.PROGRAMS = 5  # gradients of a bias by a few programs in whole, of others in parts, of which one is empty
    made = {
        case: calls(extents, "float16", **options)  # type: ignore[arg-type]
        for case, (extents, options) in CASES.items()
    }
    made |= {case: calls_in(adding(*given)) for case, given in ADDED.items()}
    made = {case: {kernel: own for kernel, own in known.items() if own} for case, known in made.items()}
    assert all([len(own) for own in known.values()] == [2, 2] for known in made.values())
    made["wide tiles"] = calls(WORDS | {"b": 1, "l": 128}, "float16", wide=True, p=0.25)
    found = {f"{case}: {kernel}": faults(own) for case, known in made.items() for kernel, own in known.items() if own}
    found["all keys hidden"] = hidden(made["odd and key padding"])
    found["keys hidden by a bias"] = hidden_by_bias()
    print(json.dumps(found))
