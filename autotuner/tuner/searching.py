"""Search of a space's sampled cells, round after round: proposals compile together, then race, each cell's apart."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from autotuner.checkpoint import OverError, checkpoint
from autotuner.database import Database, Filter
from autotuner.ir.records import Attributes, Call
from autotuner.kernels import KERNELS
from autotuner.space import Cell, Space, without_params
from autotuner.tuner.cell_search import SAMPLES_MIN, CellSearch
from autotuner.tuner.progress import MeasurerProtocol, Progress, Result, Stage
from autotuner.tuner.runner import NOT_YET, Race, RaceRunner
from autotuner.tuner.state import TuningState

BATCH = 4
"""Proposals of a cell that race at once: more of them know less of each other, fewer leave cores idle that compile."""

CELLS_PER_DEVICE = 2
"""Cells whose kernel does not compile and that are searched at once: a device begins the next one's race when it is
done with another."""

GIVEN_UP = ((16, 2.0), (8, 3.0))
"""Numbers of trials, and the factor by which the best of so many may be behind another cell of the same computation.
With bad luck, a cell is twice as slow as an equal one after a dozen trials."""


def begun(space: Space, known: Mapping[str, Sequence[Result]], state: TuningState) -> Space:
    """Return a space with all that is known of its sampled cells, and what their twins say to begin with."""
    calls = [call for results in known.values() for call, _ in results]
    return space.with_calls(
        [*calls, *(cell.called(params) for cell in space.cells for params in twin_starts(state, cell))]
    )


def twin_starts(state: TuningState, cell: Cell) -> Sequence[Attributes]:
    """Return the launch parameters of twins with which a search begins; none where everything is to be measured."""
    return () if state.options.exhaustive else state.twins.starts(cell)


def with_known_calls(space: Space, database: Database, environment_key: str) -> Space:
    """Return a space with everything that the database knows of its sampled cells in an environment."""
    known = known_by_cell(space, database, environment_key)
    return space.with_calls(call for results in known.values() for call, _ in results)


def cell_counts(space: Space, known: Iterable[str]) -> dict[str, int]:
    """Return how many cells of a space are enumerated and sampled, and how much of the sampled ones was tried.

    Args:
        known: keys of calls with a measurement, failures included.
    """
    cells = {cell.key: cell for cell in space.cells}
    tried = dict.fromkeys(cells, 0)
    bare = {key: without_params(call).key for key, call in space.calls.items()}
    for key in known:
        if bare.get(key) in tried:
            tried[bare[key]] += 1
    return {
        "cells_enumerated": len(set(bare.values()) - cells.keys()),
        "cells_sampled": len(cells),
        "sampled_combinations": sum(len(cell.combinations) for cell in cells.values()),
        "sampled_tried": sum(tried.values()),
    }


def known_by_cell(space: Space, database: Database, environment_key: str) -> Mapping[str, list[Result]]:
    """Return what the database knows of each sampled cell, by its key; values that are in no list are left out."""
    cells = {cell.key: cell for cell in space.cells}
    found: dict[str, list[Result]] = defaultdict(list)
    for signature, kernel in dict.fromkeys((c.call.subgraph.signature, c.kernel) for c in cells.values()):
        checkpoint()
        for row in database.measurements(Filter(environment_key, signature=signature, kernel=kernel)):
            cell = cells.get(without_params(row.call).key)
            params = row.call.candidate.params
            if cell is not None and _is_listed(cell, params) and cell.admits(params):
                found[cell.key].append((row.call, row.measurement))
    return found


def _is_listed(cell: Cell, params: Attributes) -> bool:
    if [name for name, _ in params] != [name for name, _ in cell.lists]:
        return False
    return all(
        any(value == one and type(value) is type(one) for one in values)
        for (_, value), (_, values) in zip(params, cell.lists, strict=True)
    )


NO_RACES: Iterator[Race] = iter(())

GAINS = ((4, 0.98, 1.0), (8, 0.96, 1.0), (12, 0.92, 0.98), (16, 0.82, 0.97), (inf, 0.73, 0.93))
"""Trials left of a cell, at most, and the shares of its best so far that its best comes to with them: nine cells in ten
keep more than the first share, half of them more than the second. They are from 96 cells that were recorded on an H200,
of layers of LLaMA 1B, Qwen3 and GPT-2, each with 24 trials."""


@dataclass(eq=False)
class _Heat:
    """Proposals of one cell, which race against its incumbent.

    Args:
        race: keys of the calls that are raced, once that begins.
        results: of those that are over, by key.
    """

    search: CellSearch
    proposed: tuple[Call, ...]
    race: tuple[str, ...] = ()
    results: dict[str, Result] = field(default_factory=dict)
    is_told: bool = False

    def compiled(self, known: Collection[str]) -> list[Call]:
        """Return the proposals that are not known and whose kernel compiles."""
        return [c for c in self.proposed if c.key not in known and KERNELS[c.candidate.kernel].compiles]

    @property
    def is_over(self) -> bool:
        return all(key in self.results for key in self.race)


class CellSearches:
    """Searches of a space's sampled cells, in rounds: proposals are compiled, then race against those of their cell.

    What the database knows of a cell in this environment counts towards its trials. A cell that has twins begins with
    their fastest launch parameters, and has fewer trials. Proposals race in batches, together with the best of their
    cell so far. Where compiling has to be over before timing begins, proposals of all cells are compiled together.
    Where both go on at once, a cell's proposals race when they are compiled, and its next ones are compiled while
    others race. A cell that is far behind another one of the same computation is searched no further, unless everything
    is to be measured. What is tried joins the run's space; what is not stays unknown.

    Args:
        runner: of the run; its ledger takes the results.
        known: what the database knows of cells, by their keys.
    """

    def __init__(self, runner: RaceRunner, measurer: MeasurerProtocol, known: Mapping[str, Sequence[Result]]) -> None:
        self._runner, self._measurer, self._known = runner, measurer, known
        self._ledger, self._state = runner.ledger, runner.ledger.state
        self._cells = {cell.key: cell for cell in self._ledger.space.cells}
        self._most: Mapping[str, int] = {}
        """By key, the trials until which each cell is searched now."""
        self._done = self._before = 0
        self._stage: Stage = "search"
        self._others = NO_RACES
        self._least_us: dict[str, float] = {}
        """Of every computation that is searched, by its signature: the best so far."""

    @cached_property
    def _searches(self) -> Mapping[str, CellSearch]:
        samples_min = int(dict(self._measurer.environment.policy).get("samples_min", SAMPLES_MIN))
        known = {key: {call.key: (call, m) for call, m in self._known.get(key, ())} for key in self._cells}
        for key, cell_key in self.begun_with.items():
            if key in self._ledger.known:  # measured before any search, as an operator's first call
                known[cell_key].setdefault(key, (self._ledger.space.calls[key], self._ledger.known[key]))
        found = {
            key: CellSearch(cell, [*known[key].values()], samples_min, starts=twin_starts(self._state, cell))
            for key, cell in self._cells.items()
        }
        for search in found.values():
            self._note(search)
        return found

    def expected_us(self) -> Mapping[str, tuple[float, float]]:
        """Return what cells come to when their searches go on: what nine in ten take at least, and what half do.

        By key. Cells of which nothing is timed are left out, and those that are searched no further.
        """
        found = {}
        for key, search in self._searches.items() if self._cells else ():
            us = None if search.best is None else search.best[1].median_us
            if us is not None and self._is_open(search):
                likely, median = next(gains for left, *gains in GAINS if search.left <= left)
                found[key] = (us * likely, us * median)
        return found

    def wanted(self, keys: Collection[str]) -> Mapping[str, str]:
        """Return cells that are to be searched by what is wanted: their own keys, or those of calls that are not tried.

        Returns:
            The keys of cells by those that are given; the others are of calls that are measured as any other.
        """
        if not self._cells:
            return {}
        own = {key: key if key in self._cells else self.begun_with.get(key, "") for key in keys}
        return {
            key: cell for key, cell in own.items()
            if cell and key not in self._searches[cell].tried and self._is_open(self._searches[cell])
        }  # fmt: skip

    @cached_property
    def begun_with(self) -> Mapping[str, str]:
        """The calls of cells that the space has from the beginning: the keys of their cells, by their own."""
        kernels = {cell.kernel for cell in self._cells.values()}
        calls = self._ledger.space.calls.items()
        found = {key: without_params(call).key for key, call in calls if call.candidate.kernel in kernels}
        return {key: cell for key, cell in found.items() if cell in self._cells}

    def search_all(self) -> None:
        """Search all cells, until all their trials are over, the state says enough, or so the job's limits say."""
        if self._cells:
            self._stage = "search"
            self._run({key: len(search.tried) + search.left for key, search in self._searches.items()})

    def search(self, cells: Collection[str], others: Iterator[Race] = NO_RACES) -> None:
        """Search some cells, given by their keys, until the trials of each have doubled.

        Args:
            others: races of other calls, which are timed as long as all proposals are still to be compiled.
        """
        if cells:
            self._stage, self._others = "measure", others
            self._run({key: max(BATCH, 2 * len(self._searches[key].tried)) for key in cells})

    def _run(self, most: Mapping[str, int]) -> None:
        """Search cells until each has so many trials, or until the state says enough."""
        self._most = most
        searches = [self._searches[key] for key in most]
        self._done, self._before = 0, sum(len(search.tried) for search in searches)
        compiling = [search for search in searches if KERNELS[search.cell.kernel].compiles]
        others = [search for search in searches if not KERNELS[search.cell.kernel].compiles]
        devices = self._measurer.devices
        width = 1 if devices == 1 else CELLS_PER_DEVICE * devices
        began_s = self._state.spent_s
        self._tell()
        with suppress(OverError), self._state.within(self._stage):
            if self._runner.compilation.is_beside:
                self._race(self._compiled_heats(compiling, others, width))
            else:
                apart = [others[place : place + width] for place in range(0, len(others), width)]
                for together in ([compiling] if compiling else []) + apart:
                    while (active := [search for search in together if self._goes_on(search)]) and not self._enough():
                        self._race(self._round(active))
        self._runner.measuring_s += self._state.spent_s - began_s
        self._ledger.extend(call for search in searches for call in search.tried.values())

    def _round(self, active: Sequence[CellSearch]) -> list[_Heat]:
        """Return a heat of each search, all compiled."""
        heats = self._proposed(active)
        compiled = [call for heat in heats for call in heat.compiled(self._ledger.known)]
        for call, problem in self._measurer.prepare(compiled) if compiled else ():
            if problem is not None:
                self._ledger.learn(call, problem)
        return heats

    def _compiled_heats(
        self, compiling: Sequence[CellSearch], others: Sequence[CellSearch], width: int
    ) -> Iterator[_Heat | None]:
        """Yield heats as they are compiled, and None while all are still to be; each search has one heat at a time.

        Heats of the computation that raced last go first: its operands and references are still there. It ends where
        some are given up, as the time for compiling is over.
        """
        compilation, out, last = self._runner.compilation, list[_Heat](), ""
        while True:
            compilation.hear()
            out = [heat for heat in out if not heat.is_told]
            busy = {id(heat.search) for heat in out}
            ready = [search for search in others if id(search) in busy or self._goes_on(search)][:width]
            out += self._proposed([s for s in (*compiling, *ready) if id(s) not in busy and self._goes_on(s)])
            waiting = [heat for heat in out if not heat.race]
            if not out or any(compilation.is_given_up(heat.compiled(self._ledger.known)) for heat in waiting):
                return
            ripe = [heat for heat in waiting if compilation.is_compiled(heat.proposed)]
            heat = min(ripe, key=lambda heat: heat.search.cell.call.subgraph.signature != last, default=None)
            last = last if heat is None else heat.search.cell.call.subgraph.signature
            yield heat

    def _proposed(self, searches: Iterable[CellSearch]) -> list[_Heat]:
        """Return the next heat of each search; results that other runs have stored by now become known.

        Where compiling goes on beside timing, their compilation begins.
        """
        heats = [_Heat(search, tuple(search.propose(BATCH))) for search in searches]
        self._ledger.look_up([call for heat in heats for call in heat.proposed])
        if self._runner.compilation.is_beside:
            self._runner.compilation.beside(call for heat in heats for call in heat.compiled(self._ledger.known))
        return heats

    def _race(self, heats: Iterable[_Heat | None]) -> None:
        """Race heats as they come, and tell each search the results of its own."""
        begun: dict[str, _Heat] = {}
        for call, measurement in self._runner.results(self._races(heats, begun)):
            heat = begun.get(call.key)
            if heat is None:
                continue
            heat.results[call.key] = (call, measurement)
            if heat.is_over:
                self._end(heat)
        for heat in begun.values():
            self._end(heat)  # what the measurer left out stays unknown
        self._ledger.flush()

    def _races(self, heats: Iterable[_Heat | None], begun: dict[str, _Heat]) -> Iterator[Race]:
        """Yield the race of each heat, its incumbent apart, and note by key whose calls they are."""
        for heat in heats:
            if self._enough():
                return
            if heat is None:
                yield next(self._others, NOT_YET)
                continue
            race = [call for call in heat.proposed if call.key not in self._ledger.known]
            incumbent = [] if heat.search.best is None or not race else [heat.search.best[0]]
            heat.race = tuple(call.key for call in (*incumbent, *race))
            begun.update(dict.fromkeys(heat.race, heat))
            if race:
                yield incumbent, race
            else:
                self._end(heat)

    def _end(self, heat: _Heat) -> None:
        """Tell a cell's search the results of its race: of its proposals, and of the incumbent once more."""
        if heat.is_told:
            return
        heat.is_told = True
        known = self._ledger.known
        proposed = {call.key for call in heat.proposed}
        again = [(c, m) for c, m in heat.results.values() if c.key not in proposed and m.status == "ok"]
        heat.search.tell([(call, known[call.key]) for call in heat.proposed if call.key in known] + again)
        self._done += len(heat.proposed)
        self._note(heat.search)
        self._tell()

    def _goes_on(self, search: CellSearch) -> bool:
        """Tell whether a cell is to have more trials now."""
        return len(search.tried) < self._limit(search) and self._is_open(search)

    def _limit(self, search: CellSearch) -> int:
        """Return until how many trials a cell is searched now; where none of the first batch works, two are made."""
        most = self._most.get(search.cell.key, 0)
        return max(most, 2 * BATCH) if most and search.best is None else most

    def _is_open(self, search: CellSearch) -> bool:
        """Tell whether a cell is worth more trials: by its best so far, and by the best of the same computation."""
        if not search.left or search.best is None or self._state.options.exhaustive:
            return bool(search.left)
        us, tried = search.best[1].median_us, len(search.tried)
        factor = next((factor for trials, factor in GIVEN_UP if tried >= trials), inf)
        return us is None or us <= factor * self._least_us.get(search.cell.call.subgraph.signature, inf)

    def _note(self, search: CellSearch) -> None:
        us = None if search.best is None else search.best[1].median_us
        if us is not None:
            signature = search.cell.call.subgraph.signature
            self._least_us[signature] = min(us, self._least_us.get(signature, inf))

    def _enough(self) -> bool:
        return self._state.enough(self._stage)

    def _tell(self) -> None:
        ends = 0
        for search in map(self._searches.__getitem__, self._most):
            tried = len(search.tried)
            ends += min(self._limit(search), tried + search.left) if self._is_open(search) else tried
        self._state.tell(Progress("search", self._done, ends - self._before))
