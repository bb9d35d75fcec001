"""Search of a space's sampled cells, round after round: proposals compile together, then race, each cell's apart."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

from autotuner.checkpoint import OverError, checkpoint
from autotuner.database import Database, Filter
from autotuner.ir.records import Attributes, Call
from autotuner.kernels import KERNELS
from autotuner.space import Cell, Space, without_params
from autotuner.tuner.cell_search import SAMPLES_MIN, CellSearch
from autotuner.tuner.ledger import Known, Ledger
from autotuner.tuner.progress import MeasurerProtocol, Progress, Result
from autotuner.tuner.runner import RaceRunner
from autotuner.tuner.state import TuningState

BATCH = 4
"""Proposals of a cell that race at once: more of them know less of each other, fewer leave cores idle that compile."""

CELLS_PER_DEVICE = 2
"""Cells whose kernel does not compile and that are searched at once: a device begins the next one's race when it is
done with another."""

GIVEN_UP = ((16, 2.0), (8, 3.0))
"""Numbers of trials, and the factor by which the best of so many may be behind another cell of the same computation.
With bad luck, a cell is twice as slow as an equal one after a dozen trials."""


@dataclass(frozen=True)
class Searched:
    """A space with everything that was tried of its sampled cells, and the keys of what was measured for that now."""

    space: Space
    fresh: frozenset[str]

    def counted(self, known: Known) -> Known:
        """Return what is known after measuring the space, the search's own measurements counted as measured as well."""
        fresh = known.fresh | (self.fresh & known.measurements.keys())
        counts = {"measured": len(fresh), "reused": len(known.measurements) - len(fresh)}
        counts |= cell_counts(self.space, known.measurements)
        return replace(known, fresh=fresh, counts={**known.counts, **counts})


def search_cells(space: Space, database: Database, measurer: MeasurerProtocol, state: TuningState) -> Searched:
    """Search the sampled cells of a space and add what was tried to its choices.

    What the database knows of a cell in this environment counts towards its trials. A cell that has twins begins with
    their fastest launch parameters, and has fewer trials. Proposals race in batches, together
    with the best of their cell so far. Cells whose kernel compiles take turns, so that one round of proposals compiles
    on all cores; the others follow one after another, or a few at once for each of several devices. A cell that is far
    behind another one of the same computation is searched no further, unless everything is to be measured. It ends
    early where the job's limits say so; what is not tried stays unknown.
    """
    if not space.cells:
        return Searched(space, frozenset())
    searches: list[CellSearch] = []
    ledger = Ledger(replace(space, choices=(), conversions=()), database, measurer.environment.key, state)
    with suppress(OverError), state.within("search"), RaceRunner(ledger, measurer) as runner:
        known = _known_by_cell(space, database, measurer.environment.key)
        for cell in space.cells:
            starts = () if state.options.exhaustive else state.twins.starts(cell)
            searches.append(CellSearch(cell, known[cell.key], _samples_min(measurer), starts=starts))
        state.reused = sum(len(search.tried) for search in searches)
        Rounds(searches, runner, measurer).run()
    tried = [call for search in searches for call in search.tried.values()]
    state.space = space.with_calls(tried)
    return Searched(state.space, frozenset(ledger.fresh))


def with_known_calls(space: Space, database: Database, environment_key: str) -> Space:
    """Return a space with everything that the database knows of its sampled cells in an environment."""
    known = _known_by_cell(space, database, environment_key)
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


def _known_by_cell(space: Space, database: Database, environment_key: str) -> Mapping[str, list[Result]]:
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


def _samples_min(measurer: MeasurerProtocol) -> int:
    return int(dict(measurer.environment.policy).get("samples_min", SAMPLES_MIN))


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


class Rounds:
    """Rounds of several searches: proposals are compiled, then race, each against those of its cell.

    Where compiling has to be over before timing begins, proposals of all cells are compiled together. Where both go on
    at once, a cell's proposals race when they are compiled, and its next ones are compiled while others race.
    """

    def __init__(self, searches: Sequence[CellSearch], runner: RaceRunner, measurer: MeasurerProtocol) -> None:
        self._searches, self._runner, self._measurer = searches, runner, measurer
        self._ledger, self._state = runner.ledger, runner.ledger.state
        self._done, self._total = 0, sum(search.left for search in searches)
        self._given_up: set[str] = set()
        self._least_us: dict[str, float] = {}
        """Of every computation that is searched, by its signature: the best so far."""
        for search in searches:
            self._note(search)

    def run(self) -> None:
        """Search all cells, or until the state says enough."""
        compiling = [search for search in self._searches if KERNELS[search.cell.kernel].compiles]
        others = [search for search in self._searches if not KERNELS[search.cell.kernel].compiles]
        devices = self._measurer.devices
        width = 1 if devices == 1 else CELLS_PER_DEVICE * devices
        self._tell()
        if self._runner.compilation.is_beside:
            self._race(self._compiled_heats(compiling, others, width))
            return
        apart = [others[place : place + width] for place in range(0, len(others), width)]
        for together in ([compiling] if compiling else []) + apart:
            while (active := [search for search in together if self._goes_on(search)]) and not self._enough():
                self._race(self._round(active))

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

        Heats of the computation that raced last go first: its operands and references are still there.
        """
        compilation, out, last = self._runner.compilation, list[_Heat](), ""
        while True:
            compilation.hear()
            out = [heat for heat in out if not heat.is_told]
            busy = {id(heat.search) for heat in out}
            ready = [search for search in others if id(search) in busy or self._goes_on(search)][:width]
            fresh = self._proposed([s for s in (*compiling, *ready) if id(s) not in busy and self._goes_on(s)])
            compilation.beside(call for heat in fresh for call in heat.compiled(self._ledger.known))
            out += fresh
            if not out:
                return
            ripe = [heat for heat in out if not heat.race and compilation.is_compiled(heat.proposed)]
            heat = min(ripe, key=lambda heat: heat.search.cell.call.subgraph.signature != last, default=None)
            last = last if heat is None else heat.search.cell.call.subgraph.signature
            yield heat

    def _proposed(self, searches: Iterable[CellSearch]) -> list[_Heat]:
        """Return the next heat of each search; results that other runs have stored by now become known."""
        heats = [_Heat(search, tuple(search.propose(BATCH))) for search in searches]
        self._ledger.look_up([call for heat in heats for call in heat.proposed])
        return heats

    def _race(self, heats: Iterable[_Heat | None]) -> None:
        """Race heats as they come, and tell each search the results of its own."""
        begun: dict[str, _Heat] = {}
        for call, measurement in self._runner.results(self._races(heats, begun)):
            heat = begun[call.key]
            heat.results[call.key] = (call, measurement)
            if heat.is_over:
                self._end(heat)
        for heat in begun.values():
            self._end(heat)  # what the measurer left out stays unknown
        self._ledger.flush()

    def _races(
        self, heats: Iterable[_Heat | None], begun: dict[str, _Heat]
    ) -> Iterator[tuple[Sequence[Call], Sequence[Call]]]:
        """Yield the race of each heat, its incumbent apart, and note by key whose calls they are."""
        for heat in heats:
            if self._enough():
                return
            if heat is None:
                yield (), ()
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
        """Tell whether a cell is worth more trials: by its best so far, and by the best of the same computation."""
        if not search.left or search.cell.key in self._given_up:
            return False
        if search.best is None or self._state.options.exhaustive:
            return True
        us, tried = search.best[1].median_us, len(search.tried)
        factor = next((factor for trials, factor in GIVEN_UP if tried >= trials), inf)
        if us is not None and us > factor * self._least_us.get(search.cell.call.subgraph.signature, inf):
            self._given_up.add(search.cell.key)
            self._total -= search.left
            return False
        return True

    def _note(self, search: CellSearch) -> None:
        us = None if search.best is None else search.best[1].median_us
        if us is not None:
            signature = search.cell.call.subgraph.signature
            self._least_us[signature] = min(us, self._least_us.get(signature, inf))

    def _enough(self) -> bool:
        return self._state.enough("search")

    def _tell(self) -> None:
        self._state.tell(Progress("search", self._done, self._total))
