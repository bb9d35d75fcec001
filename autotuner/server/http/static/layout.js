// Places the boxes of a plan, apart from the page, which stays usable meanwhile. Forward runs down, backward up.

importScripts("vendor/dagre.js");

const MANY = 300;

onmessage = ({ data }) => {
  postMessage(data.map(({ nodes, edges, direction }) => placed(nodes, edges, direction)));
};

function placed(nodes, edges, rankdir) {
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir, nodesep: 24, ranksep: nodes.length > MANY ? 40 : 26, edgesep: 12, ranker: nodes.length > MANY ? "longest-path" : "network-simplex" });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const { id, width, height } of nodes) graph.setNode(id, { width, height });
  for (const [source, target] of edges) graph.setEdge(source, target);
  dagre.layout(graph);
  const { width = 0, height = 0 } = graph.graph();
  return {
    width: Number.isFinite(width) ? width : 0,
    height: Number.isFinite(height) ? height : 0,
    nodes: graph.nodes().map((id) => ({ id, x: graph.node(id).x, y: graph.node(id).y })),
    edges: graph.edges().map(({ v, w }) => ({ source: v, target: w, points: graph.edge(v, w).points })),
  };
}
