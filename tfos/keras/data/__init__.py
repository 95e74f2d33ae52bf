"""`ctx.dataset`: batches as tensors, epoch lengths, prefetching."""
