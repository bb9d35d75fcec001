"""Examples of the OpenAPI document; a test holds them to what the service takes and sends."""

from typing import Any

from autotuner.server.http.plan_examples import CANDIDATES, DIFFERENCES, PLAN, STEPS

_KEY = "4b1f0c5be3a86a2f0d6c8f1b7c1e9d0a5f3e2d1c0b9a89786756453423120100"
_FAMILY = "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab"
_CPU = "Intel Xeon Platinum 8481C"
_WORKER = "tuner-1/4026531836:4711:1834472"
_AT, _LATER = "2026-03-02T09:30:00Z", "2026-03-02T09:41:12.500000Z"

SMALL_MODEL: dict[str, Any] = {
    "version": 1,
    "name": "projection",
    "axes": {"b": "row", "h": "hidden", "f": "feature"},
    "options": {"activation": {"default": "gelu_erf", "choices": ["gelu_erf", "relu"]}},
    "presets": {"small": {"b": 64, "h": 128, "f": 256}},
    "inputs": {"x": {"axes": "bh"}},
    "parameters": {"weight": "fh", "offset": "f"},
    "operators": [
        {"name": "product", "kind": "contraction", "spec": "bh,fh->bf", "inputs": ["x", "weight"],
         "outputs": ["product"]},
        {"name": "biased", "kind": "bias", "spec": "bf,f->bf", "inputs": ["product", "offset"], "outputs": ["biased"]},
        {"name": "y", "kind": "$activation", "spec": "bf->bf", "inputs": ["biased"], "outputs": ["y"]},
    ],
    "outputs": ["y"],
}  # fmt: skip

SUBMISSIONS: dict[str, dict[str, Any]] = {
    "known": {
        "summary": "A model of the service, with another length",
        "value": {"model": "bert-encoder:tiny", "extents": {"l": 32}, "options": {"activation": "relu"}, "gap": 0.05},
    },
    "limited": {
        "summary": "Ten minutes of measuring at most",
        "value": {"model": "bert-encoder", "preset": "tiny", "device": {"type": "cpu"}, "limits": {"seconds": 600}},
    },
    "budget": {
        "summary": "At most 64 MiB, and everything measured",
        "value": {"model": "bert-encoder:tiny", "budget_bytes": 67108864, "exhaustive": True},
    },
    "inline": {
        "summary": "The content of a model file",
        "value": {"model": SMALL_MODEL, "preset": "small", "options": {"activation": "relu"}, "end_to_end": False},
    },
}

QUEUED: dict[str, Any] = {
    "id": 7, "state": "queued", "cancelling": False, "attended": False, "model": "bert-encoder:tiny",
    "family": _FAMILY, "extents": {"b": 4, "l": 32, "h": 128, "n": 4, "p": 32, "f": 512},
    "options": {"activation": "relu"}, "dtype": "float32", "device_type": "cpu", "device_name": None, "gap": 0.05,
    "estimated_gap": None, "budget_bytes": None, "numerics": "exact", "exhaustive": False,
    "limits": {"seconds": None, "measurements": None}, "worker": None, "attempt": 0, "priority": 0,
    "progress": None, "counts": {},
    "configuration_id": None, "created_at": _AT, "started_at": None, "finished_at": None, "message": "",
    "revision": 1,
}  # fmt: skip
_PROGRESS: dict[str, Any] = {
    "stage": "measure", "done": 420, "total": 1733, "measured": 380, "reused": 40, "failed": 3, "best_us": 5120.4,
    "bound_us": 3990.1, "gap": 0.283, "estimated_gap": 0.041, "eta_s": 95.0, "left_s": 130.0,
}  # fmt: skip
RUNNING = QUEUED | {
    "state": "running",
    "worker": _WORKER,
    "attempt": 1,
    "progress": _PROGRESS,
    "started_at": _AT,
    "revision": 9,
}
CANCELLING = RUNNING | {"cancelling": True, "revision": 10}
FINISHED = RUNNING | {
    "state": "finished",
    "progress": _PROGRESS | {"stage": "done", "done": 1733, "gap": 0.04, "eta_s": 0.0, "left_s": 0.0},
    "counts": {"calls": 1733, "measured": 1693, "reused": 40, "failed": 3}, "configuration_id": 3,
    "finished_at": _LATER, "revision": 61,
}  # fmt: skip
JOB_PAGE = {"items": [QUEUED | {"id": 8}, FINISHED], "next": 7}
EVENTS = """\
id: 9
event: progress
data: {"id":7,"state":"running","revision":9, ...}

: still here

id: 61
event: finished
data: {"id":7,"state":"finished","configuration_id":3,"revision":61, ...}

"""

CONFIGURATION: dict[str, Any] = {
    "id": 3, "dtype": "float32", "extents": QUEUED["extents"], "complete": True, "device_type": "cpu",
    "device_name": _CPU, "environment_key": _KEY, "predicted_us": 4105.2, "measured_us": 4230.9, "created_at": _LATER,
    "configuration": {"schema": 2, "model": {"name": "bert-encoder", "preset": "tiny"}, "steps": []},
}  # fmt: skip
_DIFFERENCE = "with context as bnqp in place of bqnp and torch_matmul in place of torch_matmul_loop"
_INSTEAD = f"{_DIFFERENCE}: +3.1 us in all, at least -0.4 us within the intervals"
_CONTEXT_READS = [["attention_dropped", "bnqk"], ["value", "blnp"]]
_ALTERNATIVE: dict[str, Any] = {
    "alternative": {
        "operators": ["context"], "kernel": "torch_matmul", "params": [], "inputs": _CONTEXT_READS,
        "outputs": [["context", "bnqp"]], "extra_us": 3.1, "extra_low_us": -0.4, "predicted_us": 63.2,
    },
    "differences": [{"tensor": "context", "chosen": "bqnp", "other": "bnqp"}], "same_operators": True,
    "instead_us": 65.4, "gained_us": 2.2, "paid_us": 5.3,
    "difference": _DIFFERENCE, "words": _INSTEAD,
}  # fmt: skip
OPERATOR: dict[str, Any] = {
    "operator": "context", "kind": "contraction", "phase": "forward", "step": 7, "operators": ["context"],
    "recomputed": [], "kernel": "torch_matmul_loop", "params": [], "inputs": _CONTEXT_READS,
    "outputs": [["context", "bqnp"]], "predicted_us": 65.4, "low_us": 64.1, "high_us": 66.8, "bound_us": 40.7,
    "loss_us": 24.7, "alternative": _ALTERNATIVE, "overtaking": [], "conversions": [], "covers": [], "repeated_by": [],
    "words": [
        "context is computed in forward by torch_matmul_loop.",
        "It reads attention_dropped as bnqk, value as blnp.",
        "It writes context as bqnp.",
        "It takes 65.4 us, 64.1 to 66.8 us within its 95 % interval: 24.7 us above its own best, 40.7 us, in other "
        "forms or with another kernel.",
        f"W{_INSTEAD[1:]}.",
        "It takes 63.2 us itself where 65.4 us are taken now: 2.2 us gained here, 5.3 us paid elsewhere.",
        "The intervals overlap: it could still be the better way.",
    ],
}  # fmt: skip
TENSOR: dict[str, Any] = {
    "tensor": "context", "role": "activation", "dtype": "float32", "declared": "bqnp",
    "makers": [{"step": 7, "operators": ["context"], "kernel": "torch_matmul_loop", "form": "bqnp"}],
    "readers": [{"step": 8, "operators": ["output_projection"], "kernel": "torch_matmul", "form": "bqnp"}],
    "inside": None, "conversions": [], "alternatives": [_ALTERNATIVE],
    "words": [
        "context (activation, float32) is declared bqnp.",
        "It is made as bqnp by step 7 (context, torch_matmul_loop).",
        "It is read as bqnp by step 8 (output_projection, torch_matmul).",
        f"context {_INSTEAD}.",
    ],
}  # fmt: skip
BEST = {
    "exact": {
        "summary": "Tuned for exactly this",
        "value": {"match": "exact", "differs": [], "message": "tuned for exactly this", "best": CONFIGURATION},
    },
    "near_device": {
        "summary": "Tuned on another device",
        "value": {
            "match": "near_device",
            "differs": ["device_name"],
            "message": f"tuned on {_CPU} (cpu), not on the device that is asked for: it runs there, and may not be the "
            "fastest; POST /v1/jobs tunes for that device",
            "best": CONFIGURATION,
        },
    },
    "none": {
        "summary": "Nothing is known",
        "value": {
            "match": "none",
            "differs": [],
            "message": "nothing is known of this model: POST /v1/jobs tunes for it",
            "best": None,
        },
    },
}

_STATUSES = {"ok": 1690, "refused": 3, "wrong": 0, "error": 0, "timeout": 0, "crashed": 0, "out_of_memory": 0}
MEASUREMENT_PAGE: dict[str, Any] = {
    "items": [
        {
            "id": 12, "environment_key": _KEY, "call_key": _FAMILY, "signature": _KEY, "kinds": ["bias", "gelu_erf"],
            "kernel": "inductor_fused", "forms": ["ab", "b", "ab"], "params": {"block": 128},
            "extents": [[256, 512], [512], [256, 512]], "status": "ok", "median_us": 41.5, "low_us": 41.1,
            "high_us": 42.0, "samples": 20, "workspace_bytes": 0, "message": "", "measured_at": _AT,
        }
    ],
    "next": 12,
    "statistics": {"statuses": _STATUSES, "least_us": 0.9, "mean_us": 130.4, "greatest_us": 2210.7},
}  # fmt: skip
DEVICES: list[dict[str, Any]] = [
    {
        "type": "cpu", "name": _CPU, "workers": [{"name": _WORKER, "started_at": _AT}],
        "environments": [
            {"key": _KEY, "facts": {"cores": 2, "threads": 2, "torch": "2.11.0"}, "policy": {"cache": "warm"},
             "measurements": _STATUSES}
        ],
    }
]  # fmt: skip
MODELS: list[dict[str, Any]] = [
    {
        "name": "projection", "dtype": "float32", "axes": SMALL_MODEL["axes"], "presets": SMALL_MODEL["presets"],
        "options": SMALL_MODEL["options"],
    }
]  # fmt: skip
CONFIGURATION_PAGE: dict[str, Any] = {
    "items": [
        {"id": 3, "model": "bert-encoder:tiny", "dtype": "float32", "extents": QUEUED["extents"], "complete": True,
         "device_type": "cpu", "device_name": _CPU, "environment_key": _KEY, "total_us": 4105.2, "measured_us": 4230.9,
         "proven_gap": 0.04, "default_us": 6310.0, "budget_bytes": None, "created_at": _LATER}
    ],
    "next": None,
}  # fmt: skip
TRACE: dict[str, Any] = {
    "points": [
        {"at": _AT, "measured": 30, "reused": 0, "failed": 0, "best_us": None, "bound_us": None},
        {"at": _LATER, "measured": 380, "reused": 40, "failed": 3, "best_us": 5120.4, "bound_us": 3990.1},
    ]
}
CALLER: dict[str, Any] = {"name": "token 3", "role": "submitter", "needs_token": True, "version": "0.1.0"}
TOKEN: dict[str, Any] = {
    "id": 3, "name": "ci", "role": "submitter", "state": "valid", "created_at": _AT, "expires_at": None,
    "revoked_at": None,
}  # fmt: skip
NEW_TOKENS: dict[str, dict[str, Any]] = {
    "submitter": {
        "summary": "A token for a program, for three months",
        "value": {"name": "ci", "role": "submitter", "expires_in_days": 90},
    },
}
MADE_TOKEN: dict[str, Any] = {"token": "autotuner_" + "x" * 43, "made": TOKEN}
HEALTH: dict[str, Any] = {"status": "ok", "version": "0.1.0", "queued": 1, "running": 1, "workers": 1}

METRICS = """\
# HELP autotuner_jobs Jobs by state.
# TYPE autotuner_jobs gauge
autotuner_jobs{state="queued"} 2.0
autotuner_jobs{state="running"} 1.0
# HELP autotuner_queue_oldest_seconds Time since the oldest job that waits was submitted, 0 without one.
# TYPE autotuner_queue_oldest_seconds gauge
autotuner_queue_oldest_seconds 41.5
"""

PROBLEMS: dict[int, dict[str, Any]] = {
    401: {
        "detail": "this needs a token: send `Authorization: Bearer TOKEN`; `autotuner token create` makes one",
        "instance": "/v1/jobs",
    },
    403: {
        "detail": "this needs a token of role submitter, and token 3 is of role reader: `autotuner token create --role "
        "submitter` makes one",
        "instance": "/v1/jobs",
    },
    408: {"detail": "the body did not arrive within 30 s: send it at once", "instance": "/v1/jobs"},
    404: {"detail": "no job 99: GET /v1/jobs lists those that there are", "instance": "/v1/jobs/99"},
    409: {
        "detail": "model 'bert-encoder': no axis 'z'; known: b (batch), l (position in the sequence)",
        "instance": "/v1/jobs",
    },
    413: {"detail": "the body is above 1048576 bytes, and so larger than any job can be", "instance": "/v1/jobs"},
    415: {
        "detail": "the body is 'text/plain': send JSON with `Content-Type: application/json`",
        "instance": "/v1/jobs",
    },
    421: {
        "detail": "this service does not answer to the host 'tuning.example': ask it under its own address, or start "
        "it with `autotuner serve --allow-host tuning.example` (or AUTOTUNER_ALLOWED_HOSTS=tuning.example)",
        "instance": "/v1/jobs",
    },
    422: {
        "detail": "query limit: should be less than or equal to 1000, not '5000'",
        "instance": "/v1/jobs",
        "errors": [{"field": "query limit", "message": "should be less than or equal to 1000, not '5000'"}],
    },
    429: {
        "detail": "100 jobs of token 3 wait for a worker, and no more may: try again later",
        "instance": "/v1/jobs",
    },
    500: {"detail": "the service failed; its log says why", "instance": "/v1/jobs"},
    503: {
        "detail": "the database of the service cannot be used now; its log says why: try again later",
        "instance": "/v1/jobs",
    },
}

ANSWERS: dict[str, dict[str, Any]] = {
    "submit_job": {"example": QUEUED},
    "list_jobs": {"example": JOB_PAGE},
    "get_job": {"example": FINISHED},
    "cancel_job": {"example": CANCELLING},
    "best_configuration": {"examples": BEST},
    "get_configuration": {"example": CONFIGURATION},
    "explain_operator": {"example": OPERATOR},
    "explain_tensor": {"example": TENSOR},
    "list_configurations": {"example": CONFIGURATION_PAGE},
    "draw_configuration": {"example": PLAN},
    "compare_steps": {"example": STEPS},
    "list_candidates": {"example": CANDIDATES},
    "compare_configurations": {"example": DIFFERENCES},
    "trace_job": {"example": TRACE},
    "get_caller": {"example": CALLER},
    "list_tokens": {"example": [TOKEN]},
    "make_token": {"example": MADE_TOKEN},
    "revoke_token": {"example": TOKEN | {"state": "revoked", "revoked_at": _LATER}},
    "list_measurements": {"example": MEASUREMENT_PAGE},
    "list_devices": {"example": DEVICES},
    "list_models": {"example": MODELS},
    "get_health": {"example": HEALTH},
    "get_liveness": {"example": {"status": "alive"}},
    "get_readiness": {"example": {"status": "ready"}},
}
"""Of the JSON that each operation answers with."""
