"""Tuning policy: the thresholds of a tuning run, apart from what a request asks for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuningPolicy:
    """Thresholds of a tuning run; tests give others.

    Args:
        space_s: without a space there is no plan, so enumerating it may take this long under any limit.
        opening_s: until there is a first plan, measuring goes on for this long under a limit of measurements.
        slack_s: until there is a first plan, space and measuring may together take this much longer than a limit of
            seconds. Then the job fails, and says that it was too short.
        finishing_s: an answer may take this long even where the job's time is over. A layer's problem is built and
            solved in half of it.
        explaining_s: for finding alternatives. An encoder layer takes a quarter of it. Steps that are not reached in
            time have no alternative.
        overtaking_max: plans listed that could be better within their intervals.
        few_calls: below this number of missing calls, measuring the roofline takes about as long as it saves, and all
            calls are measured.
        spared_share: of all calls, about this share need not be measured to prove the best plan (a small layer on a
            CPU).
        solutions: of the relaxed problem, about as many are needed until then.
        alone_factor: a call alone takes this many times as long to set up and time as one that races others.
        solve_after_s: the least time between two solutions while everything is measured.
        solve_share: of a tuning run, about this share is meant for solving, while the device rests. Where few calls are
            worth measuring it is more: a solution costs less than calls that need not be measured.
        confirm_rounds: how often the chosen calls are measured again before the choice is final.
        drift_rounds: how often a call is measured again in one run because the speed of the device changed meanwhile.
        settle_rounds: how often the chosen calls, and the whole, are timed again because they differ by more than
            `settled_share`; on a CPU, whose speed is not known.
        twins_gap, twins_rounds: where most calls have twins and no gap is asked for, measuring ends at this estimated
            gap, or when the closest rivals of the best plan were measured so often, anew after each solution.
        settled_share: of the whole as measured end to end.
        store_after_results, store_after_s: results are stored in batches of so many, or after so long.
    """

    space_s: float = 60.0
    opening_s: float = 600.0
    slack_s: float = 60.0
    finishing_s: float = 1.5
    explaining_s: float = 10.0
    overtaking_max: int = 50
    few_calls: int = 400
    spared_share: float = 0.35
    solutions: float = 30
    alone_factor: float = 3.0
    solve_after_s: float = 5.0
    solve_share: float = 0.05
    confirm_rounds: int = 4
    drift_rounds: int = 2
    settle_rounds: int = 2
    settled_share: float = 0.1
    twins_gap: float = 0.005
    twins_rounds: int = 6
    store_after_results: int = 32
    store_after_s: float = 1.0

    def lazy_pays(self, left: int, alone_s: float, solve_s: float, devices: int = 1) -> bool:
        """Say whether solving repeatedly and measuring what matters takes less time than measuring everything.

        Devices share the measuring, not the solving.

        Args:
            left: calls that are not measured.
            alone_s: for measuring one call alone on one device.
            solve_s: for one solution of the relaxed problem.
            devices: that measure at once.
        """
        return self.spared_share * left * alone_s / self.alone_factor / devices > self.solutions * solve_s


DEFAULT_POLICY = TuningPolicy()
