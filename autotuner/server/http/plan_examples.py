"""Examples of plans in the OpenAPI document; a test holds them to what the service sends."""

from typing import Any

_WEIGHED: dict[str, Any] = {
    "alternative": {
        "operators": ["context"], "kernel": "torch_matmul", "params": [],
        "inputs": [["attention_dropped", "bnqk"], ["value", "blnp"]], "outputs": [["context", "bnqp"]],
        "extra_us": 3.1, "extra_low_us": -0.4, "predicted_us": 63.2,
    },
    "differences": [{"tensor": "context", "chosen": "bqnp", "other": "bnqp"}], "same_operators": True,
    "instead_us": 65.4, "gained_us": 2.2, "paid_us": 5.3, "difference": "with context as bnqp in place of bqnp",
    "words": "with context as bnqp in place of bqnp: +3.1 us in all, at least -0.4 us within the intervals",
}  # fmt: skip
_STEP: dict[str, Any] = {
    "number": 7, "label": "context", "phase": "forward", "step_class": "contraction", "kernel": "torch_matmul_loop",
    "params": {}, "members": [
        {"name": "context", "kind": "contraction", "operator_class": "contraction", "again": False},
    ],
    "reads": [], "makes": [], "inputs": [["attention_dropped", "bnqk"], ["value", "blnp"]],
    "outputs": [["context", "bqnp"]], "predicted_us": 65.4, "low_us": 64.1, "high_us": 66.8, "best_us": 40.7,
    "share": 0.016, "flop": 1048576, "moved_bytes": 196608, "other": _WEIGHED,
}  # fmt: skip
_CONTEXT: dict[str, Any] = {"tensor": "context", "form": "bqnp", "declared": True, "role": ""}
_SAVED: dict[str, Any] = {"tensor": "value", "form": "blnp", "declared": True, "role": ""}
PLAN: dict[str, Any] = {
    "reference": "bert-encoder:tiny", "dtype": "float32",
    "lead": "One training step of bert-encoder:tiny in float32 takes 4.23 ms on a processor, measured end to end.",
    "doubts": [], "figures": [{"name": "proven gap", "value": "4.0 %", "words": "no plan takes less than 3.95 ms"}],
    "totals": [
        {"name": "this configuration", "us": 4105.2, "against": None, "words": "each kernel's median", "is_plan": True},
        {"name": "default", "us": 6310.0, "against": 1.54, "words": "every operator alone", "is_plan": False},
    ],
    "needs": [
        {"name": "peak, as planned", "count": 1898000, "against": None, "words": "the most at any time",
         "is_plan": True},
    ],
    "remarks": ["No tensor is converted."], "steps": [_STEP],
    "flows": [{"made": _CONTEXT, "source": 7, "targets": [8], "is_output": False}],
    "links": [{"made": _SAVED, "source": 3, "target": 30}],
    "classes": [
        {"name": "contraction", "steps": 16, "operators": 18, "forward_us": 1200.0, "backward_us": 2100.0,
         "share": 0.8, "flop_share": 0.99, "bytes_share": 0.4},
    ],
    "kernels": [{"name": "torch_matmul_loop", "number": 4, "us": 260.1, "share": 0.06}],
    "fused_sets": [
        {"operators": ["scores", "scaled_scores"], "kernel": "torch_matmul_scale", "best_us": 21.6, "instead_us": 22.8,
         "chosen": True, "alone_us": 27.0},
    ],
    "overtaking": [_WEIGHED], "overtaking_count": 1,
    "counts": [
        {"name": "calls", "tuned": 1733, "now": None, "words": "different calls", "is_part": False},
    ],
    "memory": [{"step": 7, "saved_bytes": 524288, "working_bytes": 65536, "output_bytes": 0}], "budget_bytes": None,
    "front": [{"predicted_us": 4105.2, "held_bytes": 1048576, "peak_bytes": 1898000}], "tokens": 128,
    "ceilings": {"gb_per_s": 54.0, "tflop_per_s": {"float32": 0.31}},
    "facts": {"model": [["model", "bert-encoder"], ["preset", "tiny"]]},
}  # fmt: skip

_TIMED: dict[str, Any] = {
    "kernel": "torch_matmul", "params": [], "us": 40.7,
    "forms": [["attention_dropped", "bnqk"], ["value", "bnlp"], ["context", "bnqp"]],
}  # fmt: skip
STEPS: dict[str, Any] = {
    "steps": [
        {"label": "context", "operators": ["context"], "chosen_us": 65.4, "best": _TIMED,
         "worst": _TIMED | {"us": 97.5}, "default_us": 65.4, "candidates": 79, "measured": 60,
         "failures": [{"kernel": "cpp_matmul", "status": "refused", "message": "k is no innermost axis",
                       "candidates": 3}]},
    ],
    "counts": {"ok": 1690, "refused": 3, "unknown": 40}, "declared_us": 4480.1,
}  # fmt: skip

CANDIDATES: dict[str, Any] = {
    "operator": "context", "chosen_us": 65.4, "best_us": 40.7, "default_us": 65.4,
    "groups": [
        {"operators": ["context"],
         "forms": [["attention_dropped", "bnqk"], ["value", "blnp"], ["context", "bqnp"]], "declared": True,
         "chosen": True,
         "candidates": [
             {"kernel": "torch_matmul_loop", "params": {}, "us": 65.4, "low_us": 64.1, "high_us": 66.8,
              "extra_us": 0.0, "is_exact": True, "chosen": True},
         ], "more": 0, "unknown": 1, "failed": {"refused": 3}},
    ],
    "note": "",
}  # fmt: skip

_PART_STEP: dict[str, Any] = {
    "number": 7, "label": "context", "kernel": "torch_matmul_loop", "params": {}, "predicted_us": 65.4,
}  # fmt: skip
DIFFERENCES: dict[str, Any] = {
    "parts": [
        {"name": "context", "operators": ["context"], "phase": "forward", "one": [_PART_STEP],
         "other": [_PART_STEP | {"kernel": "torch_matmul", "predicted_us": 63.2}], "one_us": 65.4, "other_us": 63.2,
         "words": ["torch_matmul_loop in place of torch_matmul", "context as bqnp in place of bnqp"],
         "worth_us": -2.2},
    ],
    "facts": [["memory budget", "none", "67,108,864 bytes"]], "one_us": 4105.2, "other_us": 4103.0,
    "one_measured_us": 4230.9, "other_measured_us": None, "comparable": True,
    "words": ["By the sums of their kernels' times, the second is faster: 4,105.2 us against 4,103.0 us."],
}  # fmt: skip
