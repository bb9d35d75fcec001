"""Problem and solution: input and output of a solver. `formulate` builds the problem of a space and its costs."""

from autotuner.solve.problem.factors import SCHEMA, Factor, Problem, Row, Solution, State

__all__ = ["SCHEMA", "Factor", "Problem", "Row", "Solution", "State"]
