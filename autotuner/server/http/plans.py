"""Routes for looking at plans: lists of configurations, one drawn, its steps and candidates measured, two compared.

A plan is set against measurements in the search space of its graph. That space, and the solved problem over what was
measured, take seconds to make and are kept for a while.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from threading import Lock
from time import monotonic
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Path, Query
from starlette.responses import Response

from autotuner.database import Database
from autotuner.errors import InfeasibleError, ProblemError
from autotuner.ir.records import Measurement
from autotuner.plan.configuration import Configuration
from autotuner.plan.report import StepComparison, compare, tally
from autotuner.plan.report.candidates import OperatorCandidates, WholeProblem, candidates_of, declared_us
from autotuner.plan.report.differences import ConfigurationDifferences, differences
from autotuner.plan.report.picture import PlanPicture, picture
from autotuner.server.http.answers import ALWAYS_ASK, Answers, TaggedBody
from autotuner.server.http.configurations import (
    ConfigurationId,
    IfNoneMatch,
    OperatorName,
    sent,
    tagged,
)
from autotuner.server.http.connections import PLANNERS
from autotuner.server.http.documentation import refusals
from autotuner.server.http.paging import page_of
from autotuner.server.http.strict import StrictRoute
from autotuner.server.wire.requests import ConfigurationsQuery
from autotuner.server.wire.responses import ConfigurationPage, ListedConfigurationView
from autotuner.server.wire.values import Id
from autotuner.space import Space, build_space, space_file
from autotuner.tuner.ceilings import ceilings_of

KEPT = 2
"""Search spaces with their measurements: some 50 MB each."""

KEPT_S = 300.0
SOLVING_S = 10.0

OtherId = Annotated[Id, Path(description="Of the configuration that is set beside it.", examples=[2])]


@dataclass(frozen=True, slots=True)
class MeasuredSpace:
    """The search space of a configuration, and what was measured of it."""

    configuration: Configuration
    space: Space
    known: Mapping[str, Measurement]
    problem: WholeProblem | None
    note: str


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Steps against what was measured for their work.

    Args:
        counts: calls of the search space by status, and `unknown`: never measured.
        declared_us: the best plan with every tensor as declared, fused kernels included; None where there is none.
    """

    steps: tuple[StepComparison, ...]
    counts: Mapping[str, int]
    declared_us: float | None


class MeasuredSpaces:
    """The measured spaces of configurations; those asked for last are kept for a few minutes."""

    def __init__(self, database: Database, answers: Answers) -> None:
        self._database, self._answers = database, answers
        self._lock = Lock()
        self._kept: OrderedDict[tuple[int, bool], tuple[float, MeasuredSpace]] = OrderedDict()

    def of(self, configuration_id: int, *, solved: bool) -> MeasuredSpace:
        """Return the measured space of a configuration.

        Args:
            solved: with the problem over what was measured.

        Raises:
            NotFoundError: there is no such configuration.
            InputError: there is no search space for its device type.
        """
        with self._lock:
            kept = self._kept.get((configuration_id, solved))
            if kept is not None and monotonic() - kept[0] < KEPT_S:
                self._kept.move_to_end((configuration_id, solved))
                return kept[1]
            found = self._made(configuration_id, solved=solved)
            self._kept[configuration_id, solved] = monotonic(), found
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return found

    def _made(self, configuration_id: int, *, solved: bool) -> MeasuredSpace:
        plain = self._kept.get((configuration_id, False))
        if plain is not None and monotonic() - plain[0] < KEPT_S:
            configuration, space, known = plain[1].configuration, plain[1].space, plain[1].known
        else:
            configuration = self._answers.configuration(configuration_id)
            file = space_file(configuration.device_type)
            space = build_space(configuration.graph(), file, vendor=configuration.vendor)
            known = self._database.find(configuration.environment_key, tuple(space.calls))
        if not solved:
            return MeasuredSpace(configuration, space, known, None, "")
        try:
            return MeasuredSpace(configuration, space, known, WholeProblem(space, known, SOLVING_S), "")
        except (InfeasibleError, ProblemError) as error:
            return MeasuredSpace(configuration, space, known, None, f"no price in the whole is known: {error}")


def plan_routes(database: Database, answers: Answers) -> APIRouter:
    routes = APIRouter(prefix="/v1/configurations", tags=["configurations"], route_class=StrictRoute)
    spaces, planning = MeasuredSpaces(database, answers), CapacityLimiter(PLANNERS)

    async def planned(make: Callable[[], Any], if_none_match: str | None) -> Response:
        return sent(await run_sync(lambda: _body(make()), limiter=planning), ALWAYS_ASK, if_none_match)

    @routes.get(
        "",
        operation_id="list_configurations",
        summary="List configurations, the newest first",
        responses={200: {"description": "A page of configurations."}, **refusals()},
    )
    def configurations(query: Annotated[ConfigurationsQuery, Query()]) -> ConfigurationPage:
        """Return a page of configurations without their documents; `next` of a page is `before` of the next one.

        Each word of `search` must occur in model, dtype or device, in any case.
        """

        def read(number: int, before: int | None) -> list[ListedConfigurationView]:
            found = database.configurations.listed(query.search, limit=number, before=before)
            return [ListedConfigurationView.model_validate(each) for each in found]

        items, after = page_of(read, query.limit, query.before)
        return ConfigurationPage(items=items, next=after)

    @routes.get(
        "/{configuration_id}/plan",
        operation_id="draw_configuration",
        summary="Get the plan of a configuration, to be drawn",
        response_model=None,
        responses=tagged(PlanPicture, "Its steps, and the tensors between them.", 404, 409),
    )
    async def plan(configuration_id: ConfigurationId, if_none_match: IfNoneMatch = None) -> Response:
        """Return the plan of a configuration: kernel calls, the tensors between them in their forms, the figures that
        it states about itself, the measured ceilings of its device, and its memory step by step.
        """
        return await planned(partial(_picture, database, answers, configuration_id), if_none_match)

    @routes.get(
        "/{configuration_id}/steps",
        operation_id="compare_steps",
        summary="Set each step against what was measured for the same work",
        response_model=None,
        responses=tagged(MeasuredSteps, "Each step, in running order.", 404, 409),
    )
    async def steps(configuration_id: ConfigurationId, if_none_match: IfNoneMatch = None) -> Response:
        """Return for each step the best and the worst that was measured for the same operators, its default, and how
        many candidates have a time, failed, or were never measured; and the best plan with every tensor as declared.
        """

        def made() -> MeasuredSteps:
            found = spaces.of(configuration_id, solved=False)
            return MeasuredSteps(
                compare(found.space, found.known, found.configuration),
                tally(found.space, found.known),
                declared_us(found.space, found.known, SOLVING_S),
            )

        return await planned(made, if_none_match)

    @routes.get(
        "/{configuration_id}/operators/{name}/candidates",
        operation_id="list_candidates",
        summary="List all measured candidates of an operator",
        response_model=None,
        responses=tagged(OperatorCandidates, "Its candidates by cover and forms.", 404, 409),
    )
    async def candidates(
        configuration_id: ConfigurationId, name: OperatorName, if_none_match: IfNoneMatch = None
    ) -> Response:
        """Return all measured candidates of an operator in groups of one cover and the same forms, with what the best
        whole plan with each would take more: exactly near the best plan, and at least, where `is_exact` is false.
        """

        def made() -> OperatorCandidates:
            found = spaces.of(configuration_id, solved=True)
            known = name in {each.name for each in found.space.graph.operators}
            prices = found.problem.prices(name) if found.problem is not None and known else None
            return candidates_of(found.space, found.known, found.configuration, name, prices, found.note)

        return await planned(made, if_none_match)

    @routes.get(
        "/{configuration_id}/compare/{other_id}",
        operation_id="compare_configurations",
        summary="Compare two configurations step by step",
        response_model=None,
        responses=tagged(ConfigurationDifferences, "Their differences, the greatest first.", 404, 409),
    )
    async def compared(
        configuration_id: ConfigurationId, other_id: OtherId, if_none_match: IfNoneMatch = None
    ) -> Response:
        """Return the smallest parts that both compute by whole steps, in what they differ, and what that is worth."""

        def made() -> ConfigurationDifferences:
            return differences(answers.configuration(configuration_id), answers.configuration(other_id))

        return await planned(made, if_none_match)

    return routes


def _picture(database: Database, answers: Answers, configuration_id: int) -> PlanPicture:
    configuration = answers.configuration(configuration_id)
    return picture(configuration, ceilings_of(database.facts(configuration.environment_key)))


def _body(value: Any) -> TaggedBody:
    text = json.dumps(asdict(value), separators=(",", ":"))
    return TaggedBody(f'"{sha256(text.encode()).hexdigest()[:32]}"', text.encode())
