"""Updates in place of tensors that a graph makes, written as calls that change nothing.

    y = linear(x)                     y = linear(x)
    heads = y.view(2, 3, 4)           scaled = y * 2
    y *= 2                 becomes    heads = scaled.view(2, 3, 4)
    z = heads.sum()                   z = heads.sum()

What is made of the tensor before stays; whoever reads it later, or a view of it, reads the new one, or the same view of
that. A view that is changed is put back into what it is a view of. All tensors in one storage are rewritten together.
None of them is where the storage comes from outside, or a change has no functional form that is exact.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autotuner.runtime.capture.aliases import Aliases, Change, Contexts, called_example, fresh_example, put_back
from autotuner.runtime.capture.axes import UnknownError
from autotuner.runtime.capture.calls import EXAMPLE
from autotuner.runtime.capture.changed_in_place import changed_in_place, storages_of


def out_of_place(graph: fx.Graph, within: Iterable[fx.Node] = ()) -> dict[int, str]:
    """Rewrite updates in place, and return the storages that are changed in place still, each with the reason.

    Args:
        within: contexts of autocast that the graph's call is in, where it is a body.
    """
    changed = changed_in_place(graph)
    if not changed:
        return {}
    of_storage: dict[int, list[fx.Node]] = {storage: [] for storage in changed}
    for node in graph.nodes:
        for storage in storages_of(node) & changed:
            of_storage[storage].append(node)
    where = Contexts(graph, within)
    reasons: dict[int, str] = {}
    for storage, nodes in of_storage.items():
        try:
            aliases = Aliases(storage, nodes, where)
        except UnknownError as error:
            reasons[storage] = str(error)
        else:
            _Rewriting(graph, aliases).run()
    still = changed_in_place(graph)
    return {storage: reasons.get(storage, "it is changed in place") for storage in still}


@dataclass(eq=False)
class _Rewriting:
    """Rewrites the tensors of a storage, in the order of the graph.

    Attributes:
        now: the root as the last change left it, and the views of it that were made since then.
        behind: the node after which views of the root can be made.
        of: the arguments of the nodes as they were met.
        ends: what was noted of each tensor, whose examples are as the last change leaves them.
        copies: views that are made again.
    """

    graph: fx.Graph
    aliases: Aliases
    now: dict[fx.Node, fx.Node] = field(default_factory=dict)
    behind: fx.Node | None = None
    of: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    ends: dict[fx.Node, dict[str, Any]] = field(default_factory=dict)
    copies: list[fx.Node] = field(default_factory=list)

    def run(self) -> None:
        aliases = self.aliases
        self.now = {aliases.root: aliases.root}
        known = {aliases.root, *aliases.parents}
        self.ends = {node: node.meta.copy() for node in known}
        self._set_examples()
        for node in sorted({*known, *(user for each in known for user in each.users)} - {aliases.root}):
            self.of[node] = node.args, node.kwargs
            current = {each: self._current(each) for each in node.all_input_nodes if each in known}
            change = aliases.changes.get(node)
            if change is None:
                for one, other in current.items():
                    if one is not other:
                        node.replace_input_with(one, other)
                if node in aliases.parents:
                    self.now[node] = node
                    self._set_example(node, node)
            elif change.has_effect:
                self._write(node, change, current)
        for node in sorted((*aliases.parents, *self.copies), reverse=True):
            if not node.users:
                self.graph.erase_node(node)

    def _current(self, node: fx.Node) -> fx.Node:
        """Return a tensor as it is now: itself, or the same view of what the root has become."""
        node = self.aliases.of(node)
        if node not in self.now:
            parent = self._current(self.aliases.parents[node])
            args, kwargs = self.of[node]
            args = (parent, *args[1:])
            after = max(self.behind, parent) if self.behind is not None else parent
            with self.graph.inserting_after(after):
                made = self.graph.create_node(node.op, node.target, args, kwargs)
            self._set_example(made, node)
            self.copies.append(made)
            self.now[node] = made
        return self.now[node]

    def _write(self, node: fx.Node, change: Change, current: Mapping[fx.Node, fx.Node]) -> None:
        """Write a change, and the root that it leaves."""
        form = change.form
        args, kwargs = map_arg((form.args, form.kwargs), lambda each: current.get(each, each))
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        aliases = self.aliases
        held: fx.Node = aliases.of(form.changed)
        wholes: dict[fx.Node, fx.Node] = {}
        each = held
        while each is not aliases.root:  # before the change is written: these are views of what was
            each = aliases.of(aliases.parents[each])
            wholes[each] = self._current(each)
        before = node.prev
        with self.graph.inserting_before(node):
            op = "call_method" if isinstance(form.function, str) else "call_function"
            made = self.graph.create_node(op, form.function, tuple(args), dict(kwargs))
            proxy = fx.Proxy(made, tracer)
            if change.dtype is not None:
                proxy = proxy.to(change.dtype)
            while held is not aliases.root:
                parent = aliases.of(aliases.parents[held])
                proxy = put_back(held, fx.Proxy(wholes[parent], tracer), proxy)
                held = parent
        root = proxy.node
        new = before.next
        while new is not node:
            example = called_example(new.target, new.args, new.kwargs, change.autocast)
            new.meta = {**node.meta, EXAMPLE: fresh_example(example, _wants_gradient(new.all_input_nodes))}
            new = new.next
        meta = root.meta
        self._set_example(root, aliases.root)
        root.meta = {**meta, EXAMPLE: root.meta[EXAMPLE]}
        self.now = {aliases.root: root}
        self.behind = root

    def _set_examples(self) -> None:
        """Give the root an example that nothing changes, and a part of several results as well."""
        aliases = self.aliases
        self._set_example(aliases.root, aliases.root)
        if aliases.holder is not aliases.root:
            leaves, tree = pytree.tree_flatten(aliases.holder.meta[EXAMPLE])
            of_root = [
                fresh_example(each, each.requires_grad)
                if isinstance(each, Tensor) and each.untyped_storage()._cdata == aliases.storage
                else each
                for each in leaves
            ]
            aliases.holder.meta[EXAMPLE] = pytree.tree_unflatten(of_root, tree)

    def _set_example(self, node: fx.Node, like: fx.Node) -> None:
        """Note what a node is: as another one, of which a gradient is wanted where one of its operands has one."""
        meta = self.ends[like]
        example = meta.get(EXAMPLE)
        wanted = _wants_gradient(node.all_input_nodes)
        node.meta = {
            **meta,
            EXAMPLE: pytree.tree_map_only(
                Tensor, lambda each: fresh_example(each, each.requires_grad and wanted), example
            ),
        }


def _wants_gradient(nodes: Iterable[fx.Node]) -> bool:
    examples = (each for node in nodes for each in pytree.tree_leaves(node.meta.get(EXAMPLE)))
    return any(isinstance(each, Tensor) and each.requires_grad for each in examples)
