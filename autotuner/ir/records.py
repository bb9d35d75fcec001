"""Records of measuring, free of names of operators and tensors: calls, measurements and environments.

Tensors inside a record are numbered; their axes are the letters a, b, c ... in declared order, so that the same
operator in another layer or another model is the same record.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from string import ascii_letters
from typing import Any, Literal

from autotuner.ir.device import recorded_vendor
from autotuner.ir.form import Form

SCHEMA = 1
LETTERS = ascii_letters

Scalar = str | int | float | bool
ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
Attributes = tuple[tuple[str, Scalar], ...]
Status = Literal["ok", "refused", "wrong", "error", "timeout", "crashed", "out_of_memory"]
Mark = Literal["eliminated", "contended", "drifted"]
"""Remarks on a measurement beside its status: it was dropped early, so that its time is that of a few looks; most
of its samples were taken while others used the device, or while the device changed."""

DOUBTS: frozenset[Mark] = frozenset({"contended", "drifted"})
"""Marks of what is better measured again."""

STATUSES: tuple[Status, ...] = ("ok", "refused", "wrong", "error", "timeout", "crashed", "out_of_memory")


def names_axis(attribute: str) -> bool:
    """Tell whether an attribute's value is a letter of its operator's spec: `axis`, or a name that ends in `_axis`."""
    return attribute == "axis" or attribute.endswith("_axis")


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return sha256, in hex, of the canonical JSON of a value together with the schema version."""
    return _sha256(canonical_json([SCHEMA, value]))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class TensorType:
    """Elements along each axis, in declared order, and the element type as torch names it ("float32")."""

    extents: tuple[int, ...]
    dtype: str

    @property
    def axes(self) -> str:
        return LETTERS[: len(self.extents)]


@dataclass(frozen=True, slots=True)
class Node:
    """An operator without a name: its operands are numbers of tensors in the subgraph."""

    kind: str
    spec: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attributes: Attributes = ()


@dataclass(frozen=True)
class Subgraph:
    """One operator or a connected set of them, without names: what a kernel covers.

    `inputs` and `outputs` are the boundary: tensors that exist in memory before and after. A tensor that is neither
    stays inside the kernel.
    """

    nodes: tuple[Node, ...]
    tensors: tuple[TensorType, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash, which caches of rules ask for many times."""
        return hash((self.nodes, self.tensors, self.inputs, self.outputs))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # texts hash otherwise elsewhere

    @cached_property
    def boundary(self) -> tuple[int, ...]:
        """Numbers of the boundary tensors: inputs, then outputs. `Candidate.forms` is in this order."""
        return self.inputs + self.outputs

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(node.kind for node in self.nodes)

    @cached_property
    def signature(self) -> str:
        """Key of this subgraph: kinds, specs, extents, dtypes, attributes; no names."""
        return _sha256(f"[{SCHEMA},{self.canonical}]")

    @cached_property
    def canonical(self) -> str:
        """The canonical JSON of this subgraph."""
        return canonical_json(self.to_json())

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": tuple(
                {
                    "kind": node.kind,
                    "spec": node.spec,
                    "inputs": node.inputs,
                    "outputs": node.outputs,
                    "attributes": node.attributes,
                }
                for node in self.nodes
            ),
            "tensors": tuple({"extents": tensor.extents, "dtype": tensor.dtype} for tensor in self.tensors),
            "inputs": self.inputs,
            "outputs": self.outputs,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Subgraph":
        return cls(
            nodes=tuple(
                Node(
                    node["kind"],
                    node["spec"],
                    tuple(node["inputs"]),
                    tuple(node["outputs"]),
                    tuple((name, scalar) for name, scalar in node["attributes"]),
                )
                for node in value["nodes"]
            ),
            tensors=tuple(TensorType(tuple(t["extents"]), t["dtype"]) for t in value["tensors"]),
            inputs=tuple(value["inputs"]),
            outputs=tuple(value["outputs"]),
        )


@dataclass(frozen=True, order=True, slots=True)
class Candidate:
    """Kernel + form per boundary tensor (inputs, then outputs) + parameters: one thing that can be measured.

    `version` is the kernel's, so that a measurement of an older implementation is not taken for one of today's.
    """

    kernel: str
    forms: tuple[str, ...]
    params: tuple[tuple[str, Scalar], ...] = ()
    version: int = 1

    def with_params(self, params: Attributes) -> "Candidate":
        """Return the same kernel and forms with other parameters."""
        return Candidate(self.kernel, self.forms, params, self.version)

    def parsed_forms(self) -> tuple[Form, ...]:
        return tuple(Form.parse(text) for text in self.forms)

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "forms": self.forms, "params": self.params, "version": self.version}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Candidate":
        params = tuple((name, scalar) for name, scalar in value["params"])
        return cls(value["kernel"], tuple(value["forms"]), params, value["version"])


@dataclass(frozen=True)
class Call:
    """A candidate applied to a subgraph. Calls with the same `key` execute the same thing and are measured once."""

    subgraph: Subgraph
    candidate: Candidate

    @cached_property
    def key(self) -> str:
        return _sha256(f"[{SCHEMA},[{self.subgraph.canonical},{canonical_json(self.candidate.to_json())}]]")

    def to_json(self) -> dict[str, Any]:
        return {"subgraph": self.subgraph.to_json(), "candidate": self.candidate.to_json()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Call":
        return cls(Subgraph.from_json(value["subgraph"]), Candidate.from_json(value["candidate"]))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Cost of a call in one environment, or why it could not be had.

    Times in microseconds; `samples_us` holds every kept sample, `low_us` to `high_us` is the 95 % interval of the
    median. `message` is the sentence that goes with any status but `ok`. `marks` say under which conditions it came
    about. One that was eliminated early has the least of its samples in place of their median.
    """

    status: Status
    median_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    samples_us: tuple[float, ...] = ()
    workspace_bytes: int = 0
    message: str = ""
    marks: tuple[Mark, ...] = ()

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.median_us is not None):
            raise ValueError(f"a measurement with status {self.status!r} and median {self.median_us!r}: "
                             "exactly the ok ones have a time")  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "median_us": self.median_us,
            "low_us": self.low_us,
            "high_us": self.high_us,
            "samples_us": self.samples_us,
            "workspace_bytes": self.workspace_bytes,
            "message": self.message,
            "marks": self.marks,
        }

    @property
    def is_doubtful(self) -> bool:
        """True where the conditions under which it was measured say that it is better measured again."""
        return not DOUBTS.isdisjoint(self.marks)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Measurement":
        lists = {"samples_us": tuple(value["samples_us"]), "marks": tuple(value.get("marks", ()))}
        return cls(**{**value, **lists})


@dataclass(frozen=True, slots=True)
class Doubt:
    """A reason why an answer is not settled, and a sentence about it: the next request measures again.

    Args:
        reason: `no_compiler`, `contended`, `drifted`, `wide` (intervals) or `end_to_end` (predicted against measured).
    """

    reason: str
    sentence: str


NO_COMPILER = "absent"
"""The fact `compiler` of an environment in which none is found; where one is, there is no such fact."""


@dataclass(frozen=True)
class Environment:
    """Facts that make two timings comparable: device, libraries, versions, threads and measuring policy.

    `facts` and `policy` are kept sorted, so that the key does not depend on the order in which they are listed.
    """

    device_type: str
    device_name: str
    facts: tuple[tuple[str, Scalar], ...]
    policy: tuple[tuple[str, Scalar], ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "facts", tuple(sorted(self.facts)))
        object.__setattr__(self, "policy", tuple(sorted(self.policy)))

    @cached_property
    def key(self) -> str:
        return digest(asdict(self))

    @property
    def vendor(self) -> str:
        """The vendor of the device: "nvidia", "amd" or "cpu"."""
        return recorded_vendor(self.device_type, dict(self.facts))

    def to_json(self) -> dict[str, Any]:
        return {
            "device_type": self.device_type,
            "device_name": self.device_name,
            "facts": dict(self.facts),
            "policy": dict(self.policy),
        }
