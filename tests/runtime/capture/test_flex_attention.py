"""FlexAttention, which stays the other compiler's: what a block mask skips is data. What lies around it is tuned."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tests.runtime.capture.known import Compilation

WIDTH, HEADS, LENGTH = 32, 2, 16


class Block(nn.Module):
    """A pre-norm layer with an attention that hides later positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.stacked, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        b, length, width = x.shape
        heads = self.stacked(self.norm1(x)).view(b, length, 3, HEADS, width // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        y = flex_attention(query, key, value, block_mask=mask)
        assert isinstance(y, Tensor)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        found: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


@pytest.mark.slow
def test_products_on_both_sides_of_it_are_in_regions_and_compute_what_eager_does() -> None:
    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, LENGTH, LENGTH, device="cpu")
    compilation = Compilation(model)
    with torch.no_grad():  # on a CPU, torch has no backward of it
        torch.testing.assert_close(compilation.model(x, mask), model(x, mask))
    (graph,) = compilation.compiled
    assert graph.tuned_places == 4
    products = [
        [
            operator.kind for operator in region.plan.configuration.graph().operators if operator.phase == "forward"
        ].count("contraction")
        for region in compilation.regions
    ]
    assert products == [1, 3, 1, 3]
    reason = "flex_attention: what its block mask skips is data, so it stays the other compiler's"
    assert graph.reasons[reason] == 2
