"""The answer: one candidate per operator and one form per tensor, with where it comes from and how good it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, GetPydanticSchema, TypeAdapter
from pydantic_core.core_schema import dict_schema, str_schema, typed_dict_field, typed_dict_schema

from autotuner.errors import AutotunerError, ConfigurationError, InputError
from autotuner.files import write
from autotuner.ir.autodiff import training_graph
from autotuner.ir.device import recorded_vendor
from autotuner.ir.graph import Graph
from autotuner.ir.models import Model
from autotuner.ir.numerics import CLASSES, Numerics
from autotuner.ir.records import Doubt, digest
from autotuner.plan.document import (
    Count,
    Document,
    Key,
    read,
    schema_of,
    with_all,
)
from autotuner.plan.parts import Certificate, Fusion, LeanerPlan, Measured, Memory, Overlap
from autotuner.plan.step import Alternative, Step, check_branches, impossible

SCHEMA: Literal[2] = 2
MOVED = ("unfused", "chosen")

PLAIN_FIELDS = (
    "schema",
    "graph_key",
    "environment",
    "environment_key",
    "counts",
    "bytes_moved",
    "created_at",
    "versions",
)


OFF_SHARE = 0.1
"""By so much, predicted may differ from measured end to end before the answer is doubtful."""


ENVIRONMENT = typed_dict_schema(
    {
        **dict.fromkeys(("device_type", "device_name"), typed_dict_field(str_schema())),
        **dict.fromkeys(("facts", "policy"), typed_dict_field(dict_schema(), required=False)),
    },
    extra_behavior="allow",
)
"""The least that a document says of an environment."""


@dataclass(frozen=True, kw_only=True)
class Configuration(Document):
    """A solution with provenance, ready to run.

    `overtaking` lists what could still be better than what was chosen, within the intervals of what was measured.
    `doubts` are the reasons why the conditions of measuring make it worth measuring again; () for a settled answer.
    `overlap` says which steps run beside the others; None for one after the other. `leaner` are other plans, each
    slower than the one before and with fewer bytes left for backward: a whole step's memory budget mixes them.
    `numerics` is the class that was allowed; `inexact` names the tensors that are of such a class.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of all that is inside as well

    model: Model
    graph_key: Key
    environment: Annotated[Mapping[str, Any], GetPydanticSchema(lambda *_: ENVIRONMENT)]
    environment_key: Key
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]
    certificate: Certificate
    fusions: tuple[Fusion, ...]
    counts: Mapping[str, Count]
    bytes_moved: Annotated[
        Mapping[str, Count],
        AfterValidator(partial(with_all, MOVED)),
        Field(json_schema_extra={"required": list(MOVED)}),
    ]
    created_at: str
    versions: Mapping[str, str]
    measured: Measured | None = None
    memory: Memory | None = None
    overtaking: tuple[Alternative, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    overlap: Annotated[Overlap | None, GetPydanticSchema(lambda _, schema: schema(Overlap))] = None
    leaner: Annotated[tuple[LeanerPlan, ...], Field(json_schema_extra={"default": None})] = ()
    numerics: Annotated[Numerics, Field(json_schema_extra={"default": None})] = "exact"
    schema: Literal[2] = SCHEMA

    def graph(self) -> Graph:
        """Return the training graph that the steps compute."""
        return training_graph(self.model.graph())

    @property
    def device_type(self) -> str:
        """The type of the device that it was measured on, as torch names it."""
        return str(self.environment["device_type"])

    @property
    def vendor(self) -> str:
        """The vendor of the device that it was measured on: "nvidia", "amd" or "cpu"."""
        return recorded_vendor(self.device_type, self.environment.get("facts", {}))

    @property
    def budget_bytes(self) -> int | None:
        """The budget of memory that it was made for; None for none."""
        return self.memory.budget_bytes if self.memory else None

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Forward operators that backward repeats as steps of their own, rather than have held what they make."""
        return tuple(name for step in self.steps if step.again for name in step.operators)

    @property
    def inexact(self) -> dict[Numerics, tuple[str, ...]]:
        """Tensors that its steps make in storage formats or by kernels that are not exact, by numerics class."""
        found = [each for step in self.steps for each in step.inexact]
        of = {numerics: tuple(name for its, name in found if its == numerics) for numerics in CLASSES}
        return {numerics: names for numerics, names in of.items() if names}

    @property
    def kernels_us(self) -> float:
        """The sum of the steps' own timings, less what is gained where steps run beside the others."""
        return self.certificate.predicted_us - (self.overlap.gain_us if self.overlap else 0.0)

    @property
    def key(self) -> str:
        """Key of what runs: model, steps and branches, without dates and timings."""
        steps = [(s.operators, s.inputs, s.outputs, s.kernel, s.params) for s in self.steps]
        return digest([self.graph_key, steps, *([self.overlap.branches] if self.overlap else [])])

    @cached_property
    def plans(self) -> "tuple[Configuration, ...]":
        """Itself, and the same with each leaner plan in turn."""
        return (
            self,
            *(
                replace(
                    self, steps=plan.steps, memory=Memory(None, plan.held_bytes, plan.peak_bytes), measured=None,
                    certificate=replace(self.certificate, predicted_us=plan.predicted_us), overlap=None, leaner=(),
                )
                for plan in self.leaner
            ),
        )  # fmt: skip

    def with_measured(self, measured: Measured) -> "Configuration":
        """Return it with an end-to-end timing, and a doubt where that is far from what was predicted."""
        doubts = tuple(doubt for doubt in self.doubts if doubt.reason != "end_to_end")
        off = measured.predicted_over_measured(self.kernels_us)
        if abs(off) > OFF_SHARE:
            sentence = (
                f"A step was predicted to take {measured.predicted_us(self.kernels_us):,.0f} us and took "
                f"{measured.plan_us:,.0f} us end to end: {off:+.0%}, above the {OFF_SHARE:.0%} that are allowed."
            )
            doubts += (Doubt("end_to_end", sentence),)
        return replace(self, measured=measured, doubts=doubts)

    def to_json(self) -> dict[str, Any]:
        value: dict[str, Any] = {name: getattr(self, name) for name in PLAIN_FIELDS}
        value |= {
            "model": self.model.to_json(),
            "steps": [asdict(step) for step in self.steps],
            "certificate": _only_if_true(asdict(self.certificate), "default_is_marked"),
            "fusions": [asdict(fusion) for fusion in self.fusions],
            "measured": asdict(self.measured) if self.measured else None,
            "memory": asdict(self.memory) if self.memory else None,
            "overtaking": [asdict(each) for each in self.overtaking],
            **({"doubts": [asdict(doubt) for doubt in self.doubts]} if self.doubts else {}),
            **({"overlap": asdict(self.overlap)} if self.overlap else {}),
            **({"leaner": [asdict(plan) for plan in self.leaner]} if self.leaner else {}),
            **({"numerics": self.numerics} if self.numerics != "exact" else {}),
        }
        normal: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
        return normal

    @classmethod
    def from_json(cls, value: Any, origin: str = "configuration") -> "Configuration":
        """Read a configuration and check it against its schema and its own graph.

        Raises:
            ConfigurationError: another schema version, a value that the schema forbids, or steps of another graph.
        """
        given = value.get("schema") if isinstance(value, dict) else None
        if given != SCHEMA:
            raise ConfigurationError(f"{origin}: its schema version is {given!r}; this version reads {SCHEMA}")
        try:
            found = read(_adapter(), value)
            found = replace(found, model=Model.from_json(value["model"]))
            if found.overlap:
                check_branches(found.overlap.branches, len(found.steps))
            graph = found.graph()
        except (AutotunerError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{origin}: {error}") from error
        if graph.key != found.graph_key:
            raise ConfigurationError(
                f"{origin}: it was made for graph {found.graph_key[:12]}, but its model builds graph {graph.key[:12]}, "
                "as by another version: tune the model again"
            )
        _check_steps(found.steps, graph, origin, "$.steps")
        for number, plan in enumerate(found.leaner):
            _check_steps(plan.steps, graph, origin, f"$.leaner[{number}].steps")
        return found


def _check_steps(steps: Sequence[Step], graph: Graph, origin: str, place: str) -> None:
    """Check that steps compute a graph.

    Raises:
        ConfigurationError: they do not.
    """
    covered = [name for step in steps if not step.again for name in step.operators]
    if sorted(covered) != sorted(operator.name for operator in graph.operators):
        odd = set(covered) ^ {operator.name for operator in graph.operators}
        raise ConfigurationError(f"{origin}: its steps do not compute each operator once; see {sorted(odd)[:5]}")
    for number, step in enumerate(steps):
        reason = impossible(step, graph)
        if reason is not None:
            raise ConfigurationError(f"{origin}: {place}[{number}]: {reason}")


def _only_if_true(value: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a document without a field that is false: then it reads as those of before that field."""
    return value if value[name] else {key: kept for key, kept in value.items() if key != name}


@cache
def _adapter() -> TypeAdapter[Configuration]:
    return TypeAdapter(Configuration)


def json_schema() -> dict[str, Any]:
    """Return the published JSON Schema of a configuration."""
    return schema_of(_adapter())


def save_configuration(configuration: Configuration, path: str | Path) -> None:
    """Write a configuration as JSON, whole or not at all.

    Raises:
        ConfigurationError: the path cannot be written.
    """
    try:
        write(Path(path), json.dumps(configuration.to_json(), indent=1) + "\n")
    except InputError as error:
        raise ConfigurationError(str(error)) from error


def load_configuration(path: str | Path) -> Configuration:
    """Read a configuration from a JSON file.

    Raises:
        ConfigurationError: no such file, not JSON, another schema version, damaged, or of another graph.
    """
    path = Path(path)
    try:
        value = json.loads(path.read_text(), parse_constant=_no_number)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: this is no configuration, it is not JSON ({error})") from error
    return Configuration.from_json(value, str(path))


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")
