"""Fused sets by rows, as CUDA C++ written for the operands' extents: see `autotuner.kernels.rules.rows`.

A block has groups of threads that take one row each, and goes over rows in steps of the whole grid; where no norm needs
the whole row, columns are cut into tiles. Threads keep their columns, so that sums over rows stay in registers until
the end: a second kernel adds up what the blocks have left, in a fixed order. All arithmetic is in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autotuner.errors import KernelError
from autotuner.ir.records import Call, Node, Subgraph
from autotuner.kernels.cupy.launch import compiled, multiprocessors
from autotuner.kernels.rules.rows import WARP, RowLaunch, RowTable, as_rows, places_of, sums_of

Run = Callable[[], Any]

TYPES = {"float32": "float", "bfloat16": "bfloat16", "float16": "float16"}
FOLDED = 32
"""Columns, and parts of a column, that a block of the second kernel adds up."""


def rows(call: Call, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Run:
    """Compute a fused set by rows."""
    subgraph = call.subgraph
    table = as_rows(subgraph, call.candidate)
    if isinstance(table, str):
        raise KernelError(table)
    tensors = dict(zip(subgraph.boundary, (*inputs, *outputs), strict=True))
    launch = _aligned(RowLaunch.of(call.candidate.params), table, tensors)
    device = outputs[0].device
    tiles = launch.tiles(table)
    blocks = max(1, min(-(-table.rows // launch.rows), launch.blocks * multiprocessors(device) // tiles))
    text = Text(subgraph, table, launch, blocks)
    module = compiled(text.whole(), device)
    sums = text.sums
    operands = [tensors[number] for number in text.arguments]
    totals = [tensors[number] for number in text.totals]
    folds = -(-table.columns // FOLDED) * len(sums)

    def run() -> None:
        if not sums:
            module.launch("over_rows", blocks * tiles, launch.threads * launch.rows, operands)
            return
        partial = torch.empty(len(sums) * blocks * table.columns, dtype=torch.float32, device=device)
        module.launch("over_rows", blocks * tiles, launch.threads * launch.rows, [*operands, partial])
        module.launch("fold", folds, FOLDED * FOLDED, [partial, *totals])

    return run


def _aligned(launch: RowLaunch, table: RowTable, tensors: Mapping[int, Tensor]) -> RowLaunch:
    """Return a launch with vectors as short as the addresses ask for, which need not be those of measuring."""
    vector = launch.vector
    for number, operand in table.operands.items():
        if operand.place == "full" and not operand.format.has_bits:
            size = tensors[number].element_size()
            while vector > 1 and tensors[number].data_ptr() % min(vector * size, 16):
                vector //= 2
    if vector == launch.vector:
        return launch
    return RowLaunch(launch.threads, launch.rows, vector, launch.blocks, launch.unroll)


class Text:
    """The kernels' text, line by line; a tensor's value in registers is called `t` and its number."""

    def __init__(self, subgraph: Subgraph, table: RowTable, launch: RowLaunch, blocks: int) -> None:
        self._subgraph, self._table, self._launch, self._blocks = subgraph, table, launch, blocks
        self._chunks, self._tiles = launch.chunks(table), launch.tiles(table)
        self._summed = sums_of(subgraph)
        self._vectors = [n for n, place in places_of(subgraph.nodes).items() if place == "column"]
        self.totals = tuple(number for number in subgraph.outputs if number in self._summed)
        self.sums = tuple(dict.fromkeys(self._summed[number] for number in self.totals))
        self.arguments = tuple(number for number in subgraph.boundary if number not in self._summed)
        self._lines: list[str] = []
        self._depth = 0

    def whole(self) -> str:
        """Return the text of both kernels."""
        self._over_rows()
        if self.sums:
            self._fold()
        return "\n".join(self._lines) + "\n"

    def _add(self, *lines: str) -> None:
        for line in lines:
            self._depth -= line.startswith("}")
            self._lines.append("    " * self._depth + line)
            self._depth += line.endswith("{")

    def _each(self, *lines: str) -> None:
        """Add lines that run for each element of a row that a thread has: chunk k, place v."""
        self._add("#pragma unroll", "for (int k = 0; k < CHUNKS; ++k) {", "#pragma unroll",
                  "for (int v = 0; v < VECTOR; ++v) {", *lines, "}", "}")  # fmt: skip

    def _type(self, number: int) -> str:
        narrow = number in self._table.operands and self._table.operands[number].format.element
        return "uint8" if narrow else TYPES[self._subgraph.tensors[number].dtype]

    def _over_rows(self) -> None:
        launch, table = self._launch, self._table
        constants = {
            "ROWS": table.rows, "COLUMNS": table.columns, "THREADS": launch.threads, "GROUPS": launch.rows,
            "VECTOR": launch.vector, "CHUNKS": self._chunks, "TILES": self._tiles, "BLOCKS": self._blocks,
            "UNROLL": launch.unroll,
        }  # fmt: skip
        self._add(*(f"constexpr int {name} = {value};" for name, value in constants.items()))
        self._add("constexpr bool WHOLE = TILES * CHUNKS * THREADS * VECTOR == COLUMNS;")
        read = set(self._subgraph.inputs)
        arguments = [
            f"{'const ' if number in read else ''}{self._type(number)}* a{number}" for number in self.arguments
        ] + (["float* partial"] if self.sums else [])
        bounds = f"THREADS_AT_MOST({launch.threads * launch.rows})"
        self._add(f"KERNEL void {bounds} over_rows({', '.join(arguments)}) {{")
        self._add(
            "const int lane = threadIdx.x % THREADS, group = threadIdx.x / THREADS;",
            "const int tile = blockIdx.x % TILES, block = blockIdx.x / TILES;",
            "int column[CHUNKS];",
            "for (int k = 0; k < CHUNKS; ++k) column[k] = ((tile * CHUNKS + k) * THREADS + lane) * VECTOR;",
        )
        if table.normalises and launch.threads > WARP:
            self._add("SHARED float between[GROUPS * (THREADS / 32) * SUMS];")
        elif table.normalises:
            self._add("float* between = nullptr;")
        for number in self._of("column", self._subgraph.inputs):
            self._add(f"float t{number}[CHUNKS][VECTOR];")
            self._each(f"t{number}[k][v] = WHOLE || column[k] < COLUMNS ? widened(a{number}[column[k] + v]) : 0;")
        self._casts_of_vectors()
        for number in self.sums:
            self._add(f"float s{number}[CHUNKS][VECTOR] = {{}};")
        self._add("for (long long first = block * GROUPS + group; first < ROWS; first += UNROLL * BLOCKS * GROUPS) {")
        self._loads()
        self._add("#pragma unroll", "for (int u = 0; u < UNROLL; ++u) {")
        self._add("const long long row = first + u * (BLOCKS * GROUPS);", "if (row < ROWS) {")
        for number in self._of("full", self._subgraph.inputs):
            stored = self._table.operands[number].format
            if not stored.element or (stored.has_bits and not stored.is_of_masks):
                value = f"r{number}[u][k] >> v & 1" if stored.has_bits else f"widened(r{number}[u][k].at[v])"
                self._add(f"float t{number}[CHUNKS][VECTOR];")
                self._each(f"t{number}[k][v] = {value};")
        for node in self._subgraph.nodes:
            if not self._is_of_vectors(node):
                self._node(node)
        self._stores()
        self._add("}", "}", "}")
        self._partials()
        self._add("}")

    def _of(self, place: str, numbers: Sequence[int]) -> list[int]:
        return [n for n in numbers if n in self._table.operands and self._table.operands[n].place == place]

    def _is_of_vectors(self, node: Node) -> bool:
        """Tell a cast of a parameter, or of a sum, from one of rows."""
        return node.kind == "cast" and node.outputs[0] in self._vectors

    def _casts_of_vectors(self) -> None:
        """Cast parameters once, and have one block write those that others read."""
        for node in self._subgraph.nodes:
            (made,) = node.outputs if self._is_of_vectors(node) else (None,)
            if made is None or made in self._summed:
                continue
            self._add(f"float t{made}[CHUNKS][VECTOR];")
            self._each(f"t{made}[k][v] = t{node.inputs[0]}[k][v];")
            if made in self._subgraph.outputs:
                self._add("if (block == 0 && group == 0) {", "#pragma unroll", "for (int k = 0; k < CHUNKS; ++k) {")
                self._add(f"if (WHOLE || column[k] < COLUMNS) store(a{made} + column[k], t{made}[k]);", "}", "}")

    def _loads(self) -> None:
        """Load what `UNROLL` rows need before anything is computed of them."""
        full = self._of("full", self._subgraph.inputs)
        for number in full:
            if self._table.operands[number].format.has_bits:
                self._add(f"uint32 r{number}[UNROLL][CHUNKS] = {{}};")
            else:
                self._add(f"Vector<{self._type(number)}, VECTOR> r{number}[UNROLL][CHUNKS] = {{}};")
        single = self._of("row", self._subgraph.inputs)
        for number in single:
            self._add(f"float r{number}[UNROLL] = {{}};")
        self._add("#pragma unroll", "for (int u = 0; u < UNROLL; ++u) {")
        self._add("const long long row = first + u * (BLOCKS * GROUPS);", "if (UNROLL == 1 || row < ROWS) {")
        for number in single:
            self._add(f"r{number}[u] = a{number}[row];")
        self._add("#pragma unroll", "for (int k = 0; k < CHUNKS; ++k) {", "if (WHOLE || column[k] < COLUMNS) {")
        for number in full:
            operand = self._table.operands[number]
            if operand.format.has_bits:
                self._add(f"const long long i{number} = row * COLUMNS + column[k];",
                          f"r{number}[u][k] = (uint32)a{number}[i{number} >> 3] >> (i{number} & 7);")  # fmt: skip
            else:
                self._add(f"r{number}[u][k] = *reinterpret_cast<const Vector<{self._type(number)}, VECTOR>*>("
                          f"a{number} + row * {operand.pitch} + column[k]);")  # fmt: skip
        self._add("}", "}", "}", "}")

    def _stores(self) -> None:
        for number in self._of("full", self._subgraph.outputs):
            operand, inside = self._table.operands[number], "WHOLE || column[k] < COLUMNS"
            stored = f"if ({inside}) store(a{number} + row * {operand.pitch} + column[k], t{number}[k]);"
            if operand.format.has_bits:  # threads of one byte meet in it, so all of them take part
                stored = f"store_signs(a{number}, row * COLUMNS + column[k], t{number}[k], {inside});"
            self._add("#pragma unroll", "for (int k = 0; k < CHUNKS; ++k) {", stored, "}")
        for number in self._of("row", self._subgraph.outputs):
            self._add(f"if (lane == 0 && tile == 0) a{number}[row] = t{number};")

    def _node(self, node: Node) -> None:
        """Add the lines that compute one operator."""
        made = f"t{node.outputs[0]}"
        read = [f"t{number}[k][v]" for number in node.inputs]
        expression = self._expression(node, read)
        if expression is not None:
            self._add(f"float {made}[CHUNKS][VECTOR];")
            self._each(f"{made}[k][v] = {expression};")
        elif node.kind == "bias_grad":
            self._each(f"s{node.outputs[0]}[k][v] += {read[0]};")
        else:
            getattr(self, f"_{node.kind}")(node)

    def _expression(self, node: Node, read: Sequence[str]) -> str | None:
        """Return an element of a result, where it follows from the same element of the operands."""
        exact = self._subgraph.tensors[node.outputs[0]].dtype == "float32"
        match node.kind:
            case "bias" | "add":
                return f"{read[0]} + {read[1]}"
            case "scale":
                return f"{read[0]} * {_number(node, 'factor')}"
            case "multiply":
                return f"{read[0]} * {read[1]}"
            case "cast":
                return read[0]
            case "silu":
                return f"silu({read[0]})"
            case "silu_grad":
                return f"{read[0]} * silu_slope({read[1]})"
            case "relu":
                return f"({read[0]} > 0 || {read[0]} != {read[0]} ? {read[0]} : 0)"
            case "relu_grad":
                return f"({read[1]} <= 0 ? 0 : {read[0]})"
            case "gelu_erf":
                return f"gelu_erf{'_exact' * exact}({read[0]})"
            case "gelu_tanh":
                return f"gelu_tanh({read[0]})"
            case "gelu_erf_grad":
                return f"{read[0]} * gelu_erf_slope{'_exact' * exact}({read[1]})"
            case "gelu_tanh_grad":
                return f"{read[0]} * gelu_tanh_slope({read[1]})"
            case "dropout":
                return f"{read[0]} * {self._factor(node)}"
        return None

    def _factor(self, node: Node) -> str:
        """Return what dropout multiplies an element by."""
        mask = node.inputs[1]
        stored = self._table.operands[mask].format
        if not stored.element:
            return f"t{mask}[k][v]"
        scale = f"{1 / (1 - float(dict(node.attributes)['p']))!r}f"
        kept = f"(r{mask}[u][k] >> v & 1)" if stored.has_bits else f"r{mask}[u][k].at[v]"
        return f"({kept} ? {scale} : 0.0f)"

    def _layer_norm(self, node: Node) -> None:
        x, *vectors = node.inputs
        y, mean, deviation = (*node.outputs, None, None)[:3]
        inside = "(WHOLE || column[k] < COLUMNS)"
        self._add(f"float sum{y}[1] = {{}};")
        self._each(f"sum{y}[0] += t{x}[k][v];")
        self._add(f"row_sums<THREADS>(sum{y}, between, group, lane);")
        self._add(f"const float mean{y} = sum{y}[0] / COLUMNS;", f"float square{y}[1] = {{}};")
        self._each(f"const float centred = {inside} ? t{x}[k][v] - mean{y} : 0;", f"square{y}[0] += centred * centred;")
        self._add(f"row_sums<THREADS>(square{y}, between, group, lane);")
        self._add(f"const float deviation{y} = rsqrtf(square{y}[0] / COLUMNS + {_number(node, 'epsilon')});")
        self._add(f"float t{y}[CHUNKS][VECTOR];")
        scaled = "".join(f" * t{scale}[k][v]" for scale in vectors[:1])
        shifted = "".join(f" + t{shift}[k][v]" for shift in vectors[1:])
        self._each(f"t{y}[k][v] = (t{x}[k][v] - mean{y}) * deviation{y}{scaled}{shifted};")
        if mean is not None:
            self._add(f"const float t{mean} = mean{y};")
        if deviation is not None:
            self._add(f"const float t{deviation} = deviation{y};")

    def _layer_norm_grad_input(self, node: Node) -> None:
        grad, x, *scale, mean, deviation = node.inputs
        normal = f"((t{x}[k][v] - {self._row(mean)}) * {self._row(deviation)})"
        self._norm_grad_input(node, (grad, *scale), normal, deviation, centred=True)

    def _layer_norm_grad_parameters(self, node: Node) -> None:
        grad, x, mean, deviation = node.inputs
        self._norm_grad_parameters(node, grad, f"((t{x}[k][v] - {self._row(mean)}) * {self._row(deviation)})")

    def _rms_norm(self, node: Node) -> None:
        x, *scale = node.inputs
        y, root = (*node.outputs, None)[:2]
        self._add(f"float square{y}[1] = {{}};")
        self._each(f"square{y}[0] += t{x}[k][v] * t{x}[k][v];")
        self._add(f"row_sums<THREADS>(square{y}, between, group, lane);")
        self._add(f"const float root{y} = rsqrtf(square{y}[0] / COLUMNS + {_number(node, 'epsilon')});")
        self._add(f"float t{y}[CHUNKS][VECTOR];")
        scaled = "".join(f" * t{number}[k][v]" for number in scale)
        self._each(f"t{y}[k][v] = t{x}[k][v] * root{y}{scaled};")
        if root is not None:
            self._add(f"const float t{root} = root{y};")

    def _rms_norm_grad_input(self, node: Node) -> None:
        grad, x, *scale, root = node.inputs
        self._norm_grad_input(node, (grad, *scale), f"(t{x}[k][v] * {self._row(root)})", root, centred=False)

    def _rms_norm_grad_parameters(self, node: Node) -> None:
        grad, x, root = node.inputs
        self._norm_grad_parameters(node, grad, f"(t{x}[k][v] * {self._row(root)})")

    def _normalised(self, node: Node) -> None:
        (x, *mean, root), (made,) = node.inputs, node.outputs
        centred = f"(t{x}[k][v] - {self._row(mean[0])})" if mean else f"t{x}[k][v]"
        self._add(f"float t{made}[CHUNKS][VECTOR];")
        self._each(f"t{made}[k][v] = {centred} * {self._row(root)};")

    def _normalised_grad_input(self, node: Node) -> None:
        grad, normal, *scale, root = node.inputs
        centred = bool(dict(node.attributes)["centred"])
        self._norm_grad_input(node, (grad, *scale), f"t{normal}[k][v]", root, centred=centred)

    def _normalised_grad_parameters(self, node: Node) -> None:
        grad, normal = node.inputs
        self._norm_grad_parameters(node, grad, f"t{normal}[k][v]")

    def _norm_grad_input(self, node: Node, factors: Sequence[int], normal: str, root: int, *, centred: bool) -> None:
        """Add the gradient of a norm's input, from an element of its normalised input."""
        (made,) = node.outputs
        scaled = " * ".join(f"t{number}[k][v]" for number in factors)
        self._add(f"float sums{made}[{1 + centred}] = {{}};")
        self._each(f"sums{made}[0] += {scaled} * {normal};", *([f"sums{made}[1] += {scaled};"] if centred else []))
        self._add(f"row_sums<THREADS>(sums{made}, between, group, lane);", f"float t{made}[CHUNKS][VECTOR];")
        shifted = f"{scaled} - sums{made}[1] / COLUMNS" if centred else scaled
        self._each(f"t{made}[k][v] = {self._row(root)} * ({shifted} - {normal} * (sums{made}[0] / COLUMNS));")

    def _norm_grad_parameters(self, node: Node, grad: int, normal: str) -> None:
        """Add up the gradients of a norm's scale and bias, those of them that are made."""
        scale, *shift = node.outputs
        lines = [f"s{scale}[k][v] += t{grad}[k][v] * {normal};"] if scale in self.sums else []
        self._each(*lines, *(f"s{made}[k][v] += t{grad}[k][v];" for made in shift if made in self.sums))

    def _row(self, number: int) -> str:
        """Return what there is one of for each row: read, or made before."""
        return f"r{number}[u]" if number in self._subgraph.inputs else f"t{number}"

    def _partials(self) -> None:
        """Add up the groups of the block, and leave the block's sums for the second kernel."""
        if not self.sums:
            return
        several = self._launch.rows > 1
        if several:
            self._add("SHARED float across[GROUPS * CHUNKS * VECTOR * THREADS];")
        for place, number in enumerate(self.sums):
            if several:
                self._add("block_barrier();")
                self._each(f"across[((group * CHUNKS + k) * VECTOR + v) * THREADS + lane] = s{number}[k][v];")
                self._add("block_barrier();", "if (group == 0) {")
                self._each(
                    "float total = 0;",
                    "for (int g = 0; g < GROUPS; ++g) "
                    "total += across[((g * CHUNKS + k) * VECTOR + v) * THREADS + lane];",
                    f"s{number}[k][v] = total;",
                )
                self._add("}")
            self._add("if (group == 0) {", "#pragma unroll", "for (int k = 0; k < CHUNKS; ++k) {")
            self._add(f"float* to = partial + ((long long){place} * BLOCKS + block) * COLUMNS + column[k];")
            self._add(f"if (WHOLE || column[k] < COLUMNS) store(to, s{number}[k]);", "}", "}")

    def _fold(self) -> None:
        """Add the second kernel: every column's sum over the blocks."""
        totals = ", ".join(f"{self._type(number)}* a{number}" for number in self.totals)
        self._add(f"KERNEL void THREADS_AT_MOST({FOLDED * FOLDED}) fold(const float* partial, {totals}) {{")
        self._add(
            f"constexpr int PARTS = {FOLDED};",
            "constexpr int FOLD_TILES = (COLUMNS + PARTS - 1) / PARTS;",
            "SHARED float parts[PARTS * (PARTS + 1)];",
            "const int x = threadIdx.x % PARTS, y = threadIdx.x / PARTS;",
            "const int column = blockIdx.x % FOLD_TILES * PARTS + x, sum = blockIdx.x / FOLD_TILES;",
            "float total = 0;",
            "if (column < COLUMNS) {",
            "#pragma unroll 4",
            "for (int b = y; b < BLOCKS; b += PARTS) "
            "total += partial[((long long)sum * BLOCKS + b) * COLUMNS + column];",
            "}",
            "parts[x * (PARTS + 1) + y] = total;",
            "block_barrier();",
            "if (y == 0 && column < COLUMNS) {",
            "total = 0;",
            "for (int part = 0; part < PARTS; ++part) total += parts[x * (PARTS + 1) + part];",
        )
        for number in self.totals:
            place = self.sums.index(self._summed[number])
            self._add(f"if (sum == {place}) a{number}[column] = Narrow<{self._type(number)}>::of(total);")
        self._add("}", "}")


def _number(node: Node, attribute: str) -> str:
    return f"{float(dict(node.attributes)[attribute])!r}f"
