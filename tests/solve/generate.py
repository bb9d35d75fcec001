"""A problem of the size and shape that a transformer encoder layer's training graph gives, with random costs."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotuner.solve.problem import Factor, Problem, Row

# What each forward operator reads and writes, and the number of forms of what it writes.
FORWARD = """
query_projection: x weight_query > query_raw 9
key_projection: x weight_key > key_raw 9
value_projection: x weight_value > value_raw 9
query_bias: query_raw bias_query > query 9
key_bias: key_raw bias_key > key 9
value_bias: value_raw bias_value > value 9
scores: query key > scores 9
scale: scores > scaled 9
mask: scaled mask_input > masked 9
softmax: masked > weights 9
weights_dropout: weights > dropped_weights weights_mask 9
context: dropped_weights value > context 9
output_projection: context weight_output > output_raw 6
output_bias: output_raw bias_output > output 6
output_dropout: output > output_dropped output_mask 6
output_residual: output_dropped x > attended 6
norm_attention: attended scale_attention shift_attention > normed mean_attention deviation_attention 6
first_linear: normed weight_first > hidden_raw 6
first_bias: hidden_raw bias_first > hidden 6
gelu: hidden > active 6
active_dropout: active > active_dropped active_mask 6
second_linear: active_dropped weight_second > second_raw 6
second_bias: second_raw bias_second > second 6
second_dropout: second > second_dropped second_mask 6
second_residual: second_dropped normed > summed 6
norm_output: summed scale_output shift_output > y mean_output deviation_output 6
"""
# Operators that one kernel may compute together.
COVERS = (
    "query_bias key_bias value_bias",
    "scale mask softmax weights_dropout",
    "scores scale mask softmax weights_dropout context",
    "output_bias output_dropout output_residual norm_attention",
    "output_bias output_dropout output_residual",
    "first_bias gelu active_dropout",
    "second_bias second_dropout second_residual norm_output",
    "second_linear second_bias",
    "query_projection key_projection value_projection",
    "grad_norm_attention_attended grad_output_dropout_output",
    "grad_active_dropout_active grad_gelu_hidden grad_first_bias_hidden_raw",
    "grad_norm_output_summed grad_second_dropout_second",
    "grad_weights_dropout_weights grad_softmax_masked grad_mask_scaled grad_scale_scores",
)
ABSENT = "absent"


@dataclass(frozen=True)
class Node:
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def training_graph() -> tuple[list[Node], dict[str, int]]:
    """Return forward and backward operators in order, and how many forms each tensor has."""
    forward, forms = [], dict[str, int]()
    for line in FORWARD.strip().splitlines():
        name, text = line.split(": ")
        left, right = text.split(" > ")
        inputs, (*outputs, count) = tuple(left.split()), right.split()
        forward.append(Node(name, inputs, tuple(outputs)))
        for tensor in inputs:
            forms.setdefault(tensor, 1 if tensor.startswith(("bias", "shift", "scale_")) else 6)
        for tensor in outputs:
            forms[tensor] = 1 if tensor.startswith(("mean", "deviation")) else int(count)
    backward: list[Node] = []
    parts: dict[str, list[str]] = {"y": ["grad_y"]}
    forms["grad_y"] = 6
    for node in reversed(forward):
        main = node.outputs[0]
        gradient, *others = parts[main]
        for number, other in enumerate(others):
            total = f"grad_{main}_sum{number}"
            backward.append(Node(f"add_{total}", (gradient, other), (total,)))
            forms[total] = forms[main]
            gradient = total
        for wanted in node.inputs:
            if wanted == "mask_input":
                continue
            saved = [t for t in node.inputs if t != wanted and len(node.inputs) == 2 and not t.startswith("bias")]
            saved += list(node.outputs[1:]) or ([node.inputs[0]] if node.name in ("gelu", "softmax") else [])
            produced = f"grad_{wanted}_by_{node.name}"
            backward.append(Node(f"grad_{node.name}_{wanted}", (gradient, *saved), (produced,)))
            forms[produced] = forms[wanted]
            parts.setdefault(wanted, []).append(produced)
    for number, other in enumerate(parts["x"][1:]):
        total = f"grad_x_sum{number}"
        backward.append(
            Node(f"add_{total}", (parts["x"][0] if number == 0 else f"grad_x_sum{number - 1}", other), (total,))
        )
        forms[total] = forms["x"]
    return forward + backward, forms


def distinct(draw: random.Random, choices: Sequence[Sequence[str]], count: int) -> list[tuple[str, ...]]:
    """Return up to `count` different picks of one item from each choice; the first item of each among them."""
    rows = {tuple(choice[0] for choice in choices)}
    for _ in range(3 * count):
        rows.add(tuple(draw.choice(choice) for choice in choices))
        if len(rows) >= count:
            break
    return sorted(rows)


def transformer_layer(seed: int = 0, rows: int = 80, converted: bool = True, noise: float = 0.3) -> Problem:
    """Return a random problem over the training graph of one encoder layer.

    Args:
        seed: of the costs and of which combinations of forms exist.
        rows: how many ways each single operator has at most; a cover has a quarter of them.
        converted: tensors may be converted once, at a cost.
        noise: the share of a cost, at most, that does not follow from one form or another; 3 hides all structure.
    """
    draw = random.Random(seed)
    nodes, counts = training_graph()
    by_name = {node.name: node for node in nodes}
    forms = {tensor: [f"f{i}" for i in range(count)] for tensor, count in counts.items()}
    readers = {t: [n for n in nodes if t in n.inputs] for t in counts}
    writer = {t: n for n in nodes for t in n.outputs}
    # ways[operator][state] = (form of each tensor, cost)
    ways: dict[str, dict[str, tuple[dict[str, str], float]]] = {node.name: {} for node in nodes}
    for node in nodes:
        tensors = node.inputs + node.outputs
        tensors_cost = {(t, f): draw.choice((0.0, 0.0, 0.3, 1.0)) for t in tensors for f in forms[t]}
        fastest = draw.choice((5.0, 20.0, 100.0))
        for number, row in enumerate(distinct(draw, [forms[t] for t in tensors], rows)):
            slower = sum(tensors_cost[pair] for pair in zip(tensors, row, strict=True)) + draw.uniform(0, noise)
            ways[node.name][f"own{number}"] = dict(zip(tensors, row, strict=True)), fastest * (1 + slower)
    covers = [c.split() for c in COVERS]
    interior: set[str] = set()
    for place, cover in enumerate(covers):
        members = [by_name[name] for name in cover]
        inside = {t for m in members for t in m.outputs if readers[t] and all(r.name in cover for r in readers[t])}
        interior |= inside
        boundary = sorted({t for m in members for t in m.inputs + m.outputs} - inside)
        for number, row in enumerate(distinct(draw, [forms[t] for t in boundary], max(1, rows // 4))):
            chosen = dict(zip(boundary, row, strict=True)) | dict.fromkeys(inside, ABSENT)
            cost = 15.0 * len(members) * draw.uniform(1, 4)
            for member in members:
                mine = {t: chosen[t] for t in member.inputs + member.outputs}
                ways[member.name][f"cover{place}.{number}"] = mine, cost if member is members[0] else 0.0
    factors = list(_operator_factors(nodes, ways))
    for one, other in sorted({pair for cover in covers for pair in itertools.pairwise(cover)}):
        both = {place for place, cover in enumerate(covers) if one in cover and other in cover}
        table: dict[Row, float] = {
            (a, b): 0.0
            for a in ways[one]
            for b in ways[other]
            if a == b or not any(s.startswith(f"cover{place}.") for s in (a, b) for place in both)
        }
        factors.append(Factor(f"together {one} {other}", (one, other), table))
    for tensor, available in forms.items():
        states = [(p, a) for p in available for a in available if a == p or converted]
        states += [(ABSENT, ABSENT)] if tensor in interior else []
        name = {state: f"{state[0]}+{state[1]}" for state in states}
        prices = {s: 0.0 if s[0] == s[1] else draw.uniform(3, 25) for s in states}
        factors.append(
            Factor(f"convert {tensor}", (f"form {tensor}",), {(name[s],): price for s, price in prices.items()})
        )
        for node in [*readers[tensor], *([writer[tensor]] if tensor in writer else [])]:
            writes = tensor in node.outputs
            link: dict[Row, float] = {
                (state, name[s]): 0.0
                for state, (chosen, _) in ways[node.name].items()
                for s in states
                if chosen[tensor] == s[0] or (not writes and chosen[tensor] == s[1])
            }
            factors.append(Factor(f"{node.name} of {tensor}", (node.name, f"form {tensor}"), link))
    chain = [v for node in nodes[:26] for v in (f"form {node.inputs[0]}", node.name)]
    return Problem(tuple(factors), tuple(dict.fromkeys(chain)))


def _operator_factors(
    nodes: Sequence[Node], ways: dict[str, dict[str, tuple[dict[str, str], float]]]
) -> Iterator[Factor]:
    for node in nodes:
        yield Factor(f"cost {node.name}", (node.name,), {(s,): cost for s, (_, cost) in ways[node.name].items()})
