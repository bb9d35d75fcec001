"""`autotuner.clip_in_buckets`: norms of gradients beside backward, with DistributedDataParallel."""

from torch.nn.parallel import DistributedDataParallel

from autotuner.runtime.bucket_clipping import BucketClipping


def clip_in_buckets(model: DistributedDataParallel, max_norm: float, *, per_bucket: bool = False) -> BucketClipping:
    """Have norms of gradients be taken bucket by bucket, while backward goes on.

    In place of `torch.nn.utils.clip_grad_norm_`, which reads all gradients once more behind backward:

        clipping = autotuner.clip_in_buckets(model, max_norm=1.0)
        loss.backward()
        clipping.clip()
        optimizer.step()

    Args:
        model: in DDP; this becomes its communication hook, so it may not have another one. Gradients are not scaled,
            as a GradScaler does.
        max_norm: of all gradients, in the 2-norm.
        per_bucket: clip each bucket in each process before the exchange, to `max_norm * sqrt(share of the elements)`,
            as Breaking MLPerf Training does for buckets of one size. The norm of all is at most `max_norm` then, but
            values are not those of `clip_grad_norm_`; `clip` scales nothing.

    Raises:
        InputError: the model is not in DDP, or has a hook; `max_norm` is not above 0.
    """
    return BucketClipping(model, max_norm, per_bucket)
