"""What a solver gets and returns; `autotuner.solve.problem.formulate` builds it from choices and measurements."""

from autotuner.solve.problem.factors import SCHEMA, Factor, Problem, Row, Solution, State

__all__ = ["SCHEMA", "Factor", "Problem", "Row", "Solution", "State"]
