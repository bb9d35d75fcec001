"""Two processes share a model of transformers, by DistributedDataParallel and FSDP2: gradients are those of eager."""

import gc
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from autotuner.runtime.region import TunedRegion
from tests.ecosystem.known import OPTIONS, remember
from tests.processes import spawn

pytestmark = pytest.mark.slow

RANKS, STEPS, LAYERS, LENGTH = 2, 2, 2, 12
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS,
         "num_attention_heads": 4, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1,
         "pad_token_id": 2, "use_cache": False}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL)),
    "phi": lambda: transformers.PhiForCausalLM(transformers.PhiConfig(**SMALL)),
}
HOWS = ("ddp", "fsdp")
WAYS = list(product(MODELS, HOWS))


class Loss(nn.Module):
    """A model whose forward is its loss; it draws no masks, since no two runs would be equal."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[name]()
        for part in self.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(getattr(part, "attention_dropout", None), float):
                part.attention_dropout = 0.0

    @property
    def layers(self) -> nn.ModuleList:
        found: nn.ModuleList = next(part for part in self.model.modules() if isinstance(part, nn.ModuleList))
        return found

    def forward(self, ids: Tensor) -> Any:
        return self.model(input_ids=ids, labels=ids).loss


def tokens(number: int) -> Tensor:
    return torch.randint(3, 64, (2, LENGTH), generator=torch.Generator().manual_seed(number))


def distribute(net: Loss, how: str) -> Any:
    if how == "ddp":
        return DistributedDataParallel(net)
    from torch.distributed.fsdp import fully_shard

    mesh = distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def gradients(net: nn.Module, called: Any, rank: int) -> list[dict[str, Tensor]]:
    """Return the loss and all gradients of some batches, whole also where they are sharded."""
    found = []
    for number in range(STEPS):
        net.zero_grad()
        loss = called(tokens(2 * number + rank))
        loss.backward()
        grads = {name.removeprefix("module."): each.grad for name, each in net.named_parameters()}
        whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in grads.items()}
        found.append({name: each.clone() for name, each in whole.items() if each is not None} | {"loss": loss.detach()})
    return found


def tuned_regions() -> list[TunedRegion]:
    return [each for each in gc.get_objects() if type(each) is TunedRegion]


def run_rank(rank: int, folder: str) -> None:
    """Keep the gradients of each model in each way, compiled and not, and how often regions ran tuned."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    found = {(name, how): trained(name, how, rank, f"{folder}/{name}-{how}-{rank}.sqlite") for name, how in WAYS}
    torch.save(found, f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def trained(name: str, how: str, rank: int, known: str) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], int]:
    """Return the gradients of a model and of its uncompiled twin, and how often regions ran tuned."""
    os.environ["AUTOTUNER_DATABASE"] = known
    net, twin = distribute(Loss(name), how), distribute(Loss(name), how)
    torch._dynamo.reset()
    # FSDP2's layers are graphs of their own, so their regions are those of the model as it is shared
    remember(Path(known), net if how == "fsdp" else Loss(name), [tokens(0)])
    torch._dynamo.reset()
    others = tuned_regions()
    compiled = torch.compile(net, backend="autotuner", options=OPTIONS, dynamic=False)
    ours, theirs = gradients(net, compiled, rank), gradients(twin, twin, rank)
    return ours, theirs, sum(region.calls for region in tuned_regions() if region not in others)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """What each process found, of all models: two processes train them, since each imports for several seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AUTOTUNER_SERVER", raising=False)
        spawn(run_rank, (str(folder),), RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_shared_model_are_those_of_eager(name: str, ranks: list[dict[tuple[str, str], Any]]) -> None:
    for how in HOWS:
        for ours, theirs, calls in (rank[name, how] for rank in ranks):
            assert calls == STEPS * LAYERS, how
            for step, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                assert one.keys() == other.keys()
                for each in one:
                    torch.testing.assert_close(
                        one[each], other[each], rtol=1e-4, atol=2e-6, msg=f"{how}, step {step}, {each}"
                    )
        first, second = (rank[name, how][0][-1] for rank in ranks)
        assert all(torch.equal(first[each], second[each]) for each in first if each != "loss"), "gradients are shared"
