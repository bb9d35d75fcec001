"""Small random problems for hypothesis, small enough for exhaustive search; costs are integers, so totals are exact."""

import itertools
import random
from dataclasses import replace

from hypothesis import strategies as st

from autotuner.solve.problem import Factor, Problem, Row

FORMS = ("ab", "ba")


@st.composite
def any_problems(draw: st.DrawFn) -> Problem:
    """Chains with residual edges, several readers of one variable, equalities, wide factors, separate parts.

    Some are infeasible, and some variables have one state only.
    """
    count = draw(st.integers(1, 6))
    names = [f"v{i}" for i in range(count)]
    state_counts = {name: draw(st.integers(1, 4)) for name in names}
    scopes = [tuple(pair) for pair in itertools.pairwise(names) if draw(st.booleans())]
    scopes += draw(st.lists(st.permutations(names).map(lambda p: tuple(p[: min(2, count)])), max_size=4))
    scopes += draw(st.lists(st.permutations(names).map(lambda p: tuple(p[: min(4, count)])), max_size=2))
    scopes += [(name,) for name in names if draw(st.booleans())]
    # Drawing every cost with hypothesis would be slow: a seed fills the tables.
    fill = random.Random(draw(st.integers(0, 2**32)))
    share = draw(st.sampled_from((0.3, 0.6, 0.9, 1.0)))
    most = draw(st.sampled_from((0, 2, 50)))
    factors = []
    for number, scope in enumerate(scopes):
        rows: list[Row] = list(itertools.product(*([f"s{i}" for i in range(state_counts[v])] for v in scope)))
        kept = [row for row in rows if fill.random() < share]
        if len(scope) == 2 and fill.random() < 0.2:
            kept = [row for row in rows if row[0] == row[1]]
        fill.shuffle(kept)
        factors.append(Factor(f"f{number}", scope, {row: float(fill.randint(0, most)) for row in kept}))
    named = {v for factor in factors for v in factor.variables}
    chain = tuple(name for name in names if name in named and draw(st.booleans()))
    return Problem(tuple(factors), chain)


@st.composite
def fused_problems(draw: st.DrawFn) -> Problem:
    """Operators in a row with a residual reader, tensors that can be converted, a cover whose parts share a token.

    Tensor t0 goes into operator o0, which makes t1, and so on; the last operator may read t0 as well.
    """
    fill = random.Random(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 3))
    residual = draw(st.booleans())
    fused = draw(st.booleans()) and count > 1
    converted = draw(st.booleans())
    states = {
        f"t{i}": [*FORMS, *(["ab > ba", "ba > ab"] if converted else []), *(["inside"] if fused and i == 1 else [])]
        for i in range(count + 1)
    }
    factors = [
        Factor(f"cost of {tensor}", (tensor,), {(s,): float(fill.randint(1, 9) if ">" in s else 0) for s in each})
        for tensor, each in states.items()
    ]
    for number in range(count):
        operator = f"o{number}"
        reads = [f"t{number}", *(["t0"] if residual and number == count - 1 and number else [])]
        writes = f"t{number + 1}"
        ways: dict[str, dict[str, str]] = {}
        for forms in itertools.product(FORMS, repeat=len(reads) + 1):
            if fill.random() < 0.8:
                ways["alone " + ",".join(forms)] = dict(zip((*reads, writes), forms, strict=True))
        if fused and number < 2:
            for form in FORMS:
                outer = dict.fromkeys((*reads, writes), form)
                ways[f"cover {form}"] = outer | {"t1": "inside"}
        factors.append(Factor(f"cost of {operator}", (operator,), {(w,): float(fill.randint(0, 20)) for w in ways}))
        for tensor in dict.fromkeys((*reads, writes)):
            rows: dict[Row, float] = {}
            for way, forms_of in ways.items():
                form = forms_of[tensor]
                for state in states[tensor]:
                    made = state.split(" > ")
                    if form == made[0] or (tensor in reads and form in made):
                        rows[way, state] = 0.0
            factors.append(Factor(f"{operator} with {tensor}", (operator, tensor), rows))
        if fused and number < 2:
            table: dict[Row, float] = {(w, w if w.startswith("cover") else "none"): 0.0 for w in ways}
            factors.append(Factor(f"token at {operator}", (operator, "token"), table))
    fill.shuffle(factors)
    return Problem(tuple(factors), tuple(f"o{i}" for i in range(count)))


def problems() -> st.SearchStrategy[Problem]:
    """Return problems of either kind."""
    return st.one_of(any_problems(), fused_problems())


@st.composite
def weighed_problems(draw: st.DrawFn) -> Problem:
    """Problems of either kind in which some rows hold bytes; all are small integers.

    Drawn from few numbers or from many, so that ties and conflicts with the time both occur.
    """
    problem = draw(problems())
    fill = random.Random(draw(st.integers(0, 2**32)))
    most_held = draw(st.sampled_from((0, 3, 40)))
    unit = draw(st.sampled_from((1, 4096)))
    share = draw(st.sampled_from((0.3, 1.0)))
    factors = []
    for factor in problem.factors:
        held = {row: unit * fill.randint(0, most_held) for row in factor.table if fill.random() < share}
        factors.append(replace(factor, held_bytes=held))
    return Problem(tuple(factors), problem.chain)


def shuffled(problem: Problem, seed: int) -> Problem:
    """Return the same problem with its factors, their variables and their rows in another order."""
    fill = random.Random(seed)
    factors = []
    for factor in problem.factors:
        places = fill.sample(range(len(factor.variables)), len(factor.variables))
        rows = list(factor.table.items())
        fill.shuffle(rows)
        weights = [{tuple(row[p] for p in places): weight for row, weight in each} for each in
                   (rows, factor.held_bytes.items())]  # fmt: skip
        table = {row: float(cost) for row, cost in weights[0].items()}
        held = {row: int(count) for row, count in weights[1].items()}
        factors.append(Factor(factor.name, tuple(factor.variables[p] for p in places), table, held))
    fill.shuffle(factors)
    return Problem(tuple(factors), problem.chain)


def totals(problem: Problem) -> dict[Row, float]:
    """Return the total of every assignment that no factor forbids, by its states in order of variables' names."""
    names = sorted(problem.variables)
    partial: dict[Row, float] = {(): 0.0}
    for number, name in enumerate(names):
        states = sorted(
            {row[f.variables.index(name)] for f in problem.factors if name in f.variables for row in f.table}
        )
        due = [f for f in problem.factors if name in f.variables and set(f.variables) <= set(names[: number + 1])]
        grown: dict[Row, float] = {}
        for row, total in partial.items():
            for state in states:
                chosen = dict(zip(names, (*row, state), strict=False))
                costs = [f.table.get(tuple(chosen[v] for v in f.variables)) for f in due]
                if None not in costs:
                    grown[*row, state] = total + sum(cost for cost in costs if cost is not None)
        partial = grown
    for factor in problem.factors:
        if not factor.variables:
            partial = {row: total + factor.table[()] for row, total in partial.items()} if factor.table else {}
    return partial
